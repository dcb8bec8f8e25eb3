"""Memory: what a service counts, as ``hippo sizes`` does, what is refused, and what it chooses."""

import dataclasses
import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import CACHE_BYTES, GIB, MOST_AUTO_SLOTS, memory_of
from hippo.engine.warmup import longest_prompt, run_longest, warm_prompt
from hippo.errors import ModelLoadError
from hippo.models.cached import CachedModel
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading import memory
from hippo.models.loading.resolve import Resolved, resolve
from hippo.models.products.linear import packs_weights
from hippo.models.quantized.forms import WeightForm
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.pairs import load

MIB = 1 << 20
CPU = torch.device("cpu")


def needs(**changes: int) -> memory.MemoryNeeds:
    values: dict[str, Any] = {"name": "a model", "device": CPU, "dtype": torch.float32}
    values |= {"context_length": 512, "slot_tokens": 512}
    values |= {"weight_bytes": 100 * MIB, "slot_bytes": 10 * MIB, "work_bytes": 10 * MIB}
    return memory.MemoryNeeds(**(values | changes))


def plan(**changes: Any) -> LoadPlan:
    return LoadPlan("m", max_context_length=512, **({"num_slots": None} | changes))


def check(*, num_slots: int | None = 5, budget_bytes: int | None = None, **sizes: int) -> None:
    given = plan(num_slots=num_slots, budget_bytes=budget_bytes)
    memory.check_fits(given, needs(**{"reserved_bytes": 40 * MIB} | sizes))


def fitting(*, budget_bytes: int | None = None, **changes: int) -> int:
    sizes, given = needs(work_bytes=15 * MIB, **changes), plan(budget_bytes=budget_bytes)
    return memory.fitting_slots(given, sizes, memory.left_for_slots(given, sizes))


@pytest.fixture
def two_hundred_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MiB are free, and the process has taken 60."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 200 * MIB)
    monkeypatch.setattr(memory, "taken_bytes", lambda device: 60 * MIB)


@pytest.mark.usefixtures("two_hundred_mib")
def test_weights_cache_work_and_earlier_media_fill_the_device_or_budget_to_the_last_byte() -> None:
    check()
    check(budget_bytes=260 * MIB)  # of which the process has 60 already
    with pytest.raises(ModelLoadError):
        check(reserved_bytes=40 * MIB + 1)
    with pytest.raises(ModelLoadError):
        check(packing_bytes=200 * MIB)
    with pytest.raises(ModelLoadError, match=r"--memory-gib leaves 0\.19 GiB"):
        check(budget_bytes=259 * MIB)


@pytest.mark.usefixtures("two_hundred_mib")
@pytest.mark.parametrize(
    "changes",
    [
        {"reserved_bytes": 41 * MIB},
        {"slot_bytes": 30 * MIB},
        {"weight_bytes": 200 * MIB},
        {"slot_bytes": 151 * MIB, "num_slots": None},
    ],
)
def test_a_refusal_says_what_each_part_takes_and_what_helps(changes: dict[str, int]) -> None:
    advice = (
        r"GiB of weights in float32, .* GiB of cache for . slots? of 512 tokens, .*: lower "
        "--slots, --max-context-length or --vision-cache-mb or --media-cache-mb, or use "
        "--dtype bfloat16, a smaller model"
    )
    with pytest.raises(ModelLoadError, match=advice):
        check(**changes)


@pytest.mark.usefixtures("two_hundred_mib")
@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 100),  # half of what is free on a CPU
        ({"reserved_bytes": 20 * MIB}, 100 - 20),
        ({"num_processes": 2}, 50),
        ({"packing_bytes": 60 * MIB}, 100),  # not beside the slots
        ({"budget_bytes": 160 * MIB}, 160 - 60),
        ({"budget_bytes": 10 * GIB}, 200),  # not beyond what is free
    ],
)
def test_what_is_left_beside_the_work_is_filled_with_slots(
    changes: dict[str, int], left: int
) -> None:
    assert fitting(**changes) == (left - 15) // 10
    assert fitting(budget_bytes=50 * MIB) == 0
    with pytest.raises(ModelLoadError, match=r"512 tokens takes 0\.01 GiB.*0\.20 GiB left"):
        memory.choose_slots(plan(), needs(), 0)


@pytest.mark.parametrize(
    ("num_fitting", "num_slots", "said"),
    [
        (5, 5, "5 fit beside the weights"),
        (999, MOST_AUTO_SLOTS, f"{MOST_AUTO_SLOTS} slots are used (--slots for more)"),
    ],
)
def test_a_model_loaded_without_a_number_has_the_slots_that_its_memory_takes(
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_fitting: int,
    num_slots: int,
    said: str,
) -> None:
    shape = find_shape(str(target_checkpoint))
    slot = shape.cache_bytes(256, bytes_each=4)
    work = shape.work_bytes(256, bytes_each=4, cache_each=4)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * (work + num_fitting * slot))
    caplog.set_level(logging.INFO)
    model = load_model(LoadPlan(str(target_checkpoint), num_slots=None, max_context_length=256))
    assert model.info.num_slots == num_slots
    assert "a sequence of 256 tokens takes" in caplog.text and said in caplog.text


TIED, SHARED = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-32B-Instruct"
GPU, SECOND_GPU = map(torch.device, ("cuda:0", "cuda:1"))


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


def test_the_longest_prompt_fills_the_context_up_to_a_grid(family: VideoLanguageModel) -> None:
    short = warm_prompt(family)
    longest = longest_prompt(family, short)
    num_tokens = int(longest.visual_indices.shape[0])
    per_grid = family.frame_limits.fixed_tokens or num_tokens // longest.visual_grids[0][0]
    left = family.info.max_context_length - 1 - longest.length
    assert short.length < longest.length and 0 <= left < per_grid
    run_longest(family, longest, slot=1, num_tapped=1)


def test_the_times_between_frames_fit_into_the_context_as_well(qwen3_checkpoint: Path) -> None:
    model = load(qwen3_checkpoint, max_context_length=4000)
    longest = longest_prompt(model, warm_prompt(model))
    per_grid = longest.length // longest.visual_grids[0][0]
    assert per_grid > 256 and 0 <= 3999 - longest.length < per_grid


def test_a_lack_of_memory_names_the_flags_that_help(family: VideoLanguageModel) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    longest = longest_prompt(family, warm_prompt(family))
    with (
        mock.patch.object(type(family), "prefill", side_effect=error),
        pytest.raises(ModelLoadError, match=r"CUDA out of memory\): lower --max-context-length"),
    ):
        run_longest(family, longest, slot=0, num_tapped=0)


@pytest.mark.parametrize("num_slots", [1, None])
def test_the_context_is_the_checkpoints_own_where_memory_suffices(
    target_checkpoint: Path, num_slots: int | None
) -> None:
    model = load_model(LoadPlan(str(target_checkpoint), num_slots=num_slots))
    assert isinstance(model, CachedModel)
    limit = model.model.config.text_config.max_position_embeddings
    assert model.info.max_context_length == limit


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_small_memory_shortens_the_context(target_checkpoint: Path, num_slots: int) -> None:
    caches: Any = {"vision_cache_bytes": 0, "media_cache_bytes": 0}
    with mock.patch("hippo.models.loading.memory.available_bytes", lambda device: 120 << 20):
        model = load_model(LoadPlan(str(target_checkpoint), num_slots=num_slots, **caches))
    context = model.info.max_context_length
    assert context % 256 == 0 and 0 < context < 4096  # the checkpoint's limit
