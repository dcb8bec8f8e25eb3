"""What a service counts before it loads is what ``hippo sizes`` counts."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import CACHE_BYTES, memory_of
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.resolve import Resolved, resolve
from hippo.models.products.linear import packs_weights
from hippo.models.quantized.forms import WeightForm
from tests.support.models.hub_forms import write_hub_form

TIED, SHARED = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-32B-Instruct"
CPU, GPU, SECOND_GPU = map(torch.device, ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: write_hub_form(tmp_path_factory.mktemp("hub") / "model", name))


def resolved(folder: Path, devices: tuple[torch.device, ...]) -> Resolved:
    """The choices of the first of several ranks, or of the only one."""
    stored = find_checkpoint(str(folder), progress=lambda stage, share: None)
    shards = SimpleNamespace(group=SimpleNamespace(device=devices[0], devices=devices))
    plan = LoadPlan(str(folder), vision_cache_bytes=None, media_cache_bytes=None, dtype="bfloat16")
    return resolve(plan, stored, "Qwen2_5_VLForConditionalGeneration", cast(Any, shards))


@pytest.mark.parametrize(
    ("name", "devices"),
    [(TIED, (CPU,)), (TIED, (GPU,)), (SHARED, (CPU, CPU)), (SHARED, (GPU, SECOND_GPU))],
)
def test_a_service_counts_as_the_command_does(
    folder_of: Any, name: str, devices: tuple[torch.device, ...]
) -> None:
    found, shape = resolved(folder_of(name), devices), find_shape(str(folder_of(name)))
    packs = packs_weights(devices[0], torch.bfloat16)
    computed = memory_of(
        shape,
        num_tokens=512,
        num_slots=1,
        num_devices=len(devices),
        cache_each=found.cache_dtype.itemsize,
        packs_weights=packs,
        media_cache_bytes=None,
    )
    needs = found.needs(512)
    weights = devices.count(devices[0]) * computed.weights
    assert needs.weight_bytes == pytest.approx(weights, rel=0.03)  # norms and biases
    # The command assumes a processor that multiplies bfloat16; on others a weight is widened.
    widened = 0 if packs or devices[0] != CPU else shape.packing_bytes(4)
    assert (needs.slot_bytes, needs.work_bytes) == (computed.cache, computed.work + widened)
    assert needs.reserved_bytes == computed.earlier_media == 2 * CACHE_BYTES
    assert needs.host_bytes == (devices[0] == GPU) * len(devices) * shape.host_bytes()


def test_a_product_of_quantised_layers_has_room_for_one_unpacked_weight(folder_of: Any) -> None:
    plain = resolved(folder_of(SHARED), (GPU,))
    quantised = dataclasses.replace(plain, form=WeightForm(name="nf4"))
    room = quantised.needs(512).work_bytes - plain.needs(512).work_bytes
    assert room == 2 * plain.shape.mlp_width * plain.shape.hidden_size


@pytest.mark.parametrize(
    ("name", "num_devices", "packs", "copies"),
    [
        (TIED, 1, False, 0.0),
        (TIED, 1, True, 1.0),
        (TIED, 2, False, 0.5),
        (TIED, 2, True, 0.5),
        (SHARED, 2, True, 0.0),
    ],
)
def test_a_tied_head_counts_beside_the_embedding_where_it_is_copied(
    name: str, num_devices: int, packs: bool, copies: float
) -> None:
    shape = find_shape(name)
    shared = shape.num_shared_parameters
    held = 2 * (shape.num_parameters - shared + shared // num_devices)
    held += int(2 * copies * shape.num_head_parameters)
    assert shape.weight_bytes(num_devices=num_devices, packs_weights=packs) == held
