"""The repositories that the README names load from files in the form that they have on the hub."""

import functools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hippo.catalog.pair import check_pair
from hippo.models.interface.base import DecodedMedia, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.products.linear import has_half_linear, packing
from tests.support.models.hub import run_with_hub, serving_hub
from tests.support.models.hub_forms import (
    FAMILY_FORMS,
    HUB_FORMS,
    family_of,
    write_hub_form,
)
from tests.support.models.reference import Reference, clip, image, prefill, prepare, step, user

MESSAGES = user(0, "what is in the thing?")
CLIP = clip(num_frames=2)


class Repositories:
    """Small counterparts of the hub's repositories, each written and loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = functools.cache(
            lambda name: write_hub_form(folder / name.replace("/", "--"), name)
        )
        self.model = functools.cache(lambda name: _load(self.folder(name)))
        self.reference = functools.cache(lambda name: Reference(self.folder(name)))


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    return Repositories(tmp_path_factory.mktemp("hub"))


def _load(folder: Path, dtype: str = "float32") -> VideoLanguageModel:
    return load_model(LoadPlan(str(folder), dtype=dtype, max_context_length=2048))


@pytest.mark.parametrize("name", HUB_FORMS)
def test_a_repository_loads_and_gives_transformers_own_logits(
    repositories: Repositories, name: str
) -> None:
    model, reference = repositories.model(name), repositories.reference(name)
    check_logits(model, reference, HUB_FORMS[name].num_padding_ids)


@pytest.mark.parametrize("name", FAMILY_FORMS.values())
def test_a_repository_loads_as_transformers_5_saves_it(
    repositories: Repositories, name: str, tmp_path: Path
) -> None:
    reference = repositories.reference(name)
    reference.model.save_pretrained(tmp_path)
    reference.processor.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())["text_config"]
    check_logits(_load(tmp_path), reference, HUB_FORMS[name].num_padding_ids)


def check_logits(
    model: VideoLanguageModel,
    reference: Reference,
    num_padding_ids: int,
    media: DecodedMedia = CLIP,
) -> None:
    """Of a prompt with the item, and of three tokens more."""
    inputs = reference.inputs(MESSAGES, [media])
    prompt = prepare(model, MESSAGES, media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    expected = reference.forward(inputs, (5, 6, 7))[-4:]
    assert expected.shape[1] == model.info.num_token_ids + num_padding_ids
    first = prefill(model, 0, prompt)
    rows = model.forward(step(0, 0, 5, 6, 7))
    torch.testing.assert_close(
        torch.cat((first[None], rows)),
        expected[:, : model.info.num_token_ids],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", FAMILY_FORMS.values())
def test_the_dtype_is_the_repositorys_own(repositories: Repositories, name: str) -> None:
    model = _load(repositories.folder(name), "auto")
    if name.startswith("llava-hf/"):
        expected = "float16" if has_half_linear() else "float32"
    else:
        expected = "float32" if packing(torch.bfloat16) is None else "bfloat16"
    assert model.info.dtype == expected
    prompt = prepare(model, MESSAGES, CLIP)
    grids = {"llava_onevision": (2, 14, 14), "internvl": (2, 16, 16)}
    assert prompt.visual_grids == (grids.get(family_of(name), (1, 12, 12)),)
    assert prefill(model, 0, prompt).isfinite().all()


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ("Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2-VL-72B-Instruct"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-27B"),
        ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-35B-A3B"),
        ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "llava-hf/llava-onevision-qwen2-7b-ov-hf"),
        ("OpenGVLab/InternVL3_5-1B-HF", "OpenGVLab/InternVL3_5-38B-HF"),
    ],
)
def test_models_of_a_family_are_a_pair_whatever_vocabulary_size_they_declare(
    repositories: Repositories, draft: str, target: str
) -> None:
    models = [repositories.model(name) for name in (draft, target)]
    check_pair(models[0].info, models[1].info)
    assert models[0].info.video_hash == models[1].info.video_hash != b""


@pytest.mark.parametrize(
    "name", ["llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "OpenGVLab/InternVL3_5-1B-HF"]
)
def test_an_image_of_the_hubs_sizes_gives_transformers_own_logits(
    repositories: Repositories, name: str
) -> None:
    plan = LoadPlan(str(repositories.folder(name)), dtype="float32", max_context_length=4096)
    media, num_padding_ids = image(height=300, width=400), HUB_FORMS[name].num_padding_ids
    check_logits(load_model(plan), repositories.reference(name), num_padding_ids, media)


HUB_SCRIPT = """
import sys
from hippo.models.load import load_model
from hippo.models.interface.plan import LoadPlan
for name in sys.argv[1:]:
    info = load_model(LoadPlan(name, max_context_length=64)).info
    sys.stdout.write(f"{info.name} {info.family} {'torchao' in sys.modules}\\n")
"""


def test_names_on_the_hub_load_from_it_and_nothing_is_said_of_torchao(
    repositories: Repositories, tmp_path: Path
) -> None:
    names = ["Qwen/Qwen2.5-VL-7B-Instruct", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"]
    with serving_hub({name: repositories.folder(name) for name in names}) as url:
        done = run_with_hub(url, tmp_path, HUB_SCRIPT, *names)
    is_imported = find_spec("torchao") is not None  # which would warn of some releases of torch
    assert done.stdout.splitlines() == [
        f"{names[0]} qwen2_5_vl {is_imported}",
        f"{names[1]} llava_onevision {is_imported}",
    ], done.stderr
    assert not [word for word in ("torchao", "_pytree") if word in done.stderr], done.stderr
