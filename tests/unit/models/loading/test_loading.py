"""Loading checkpoints: what is served, and what is said when they cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hippo.base.config import SettingsError
from hippo.catalog.pair import check_pair
from hippo.errors import IncompatiblePairError, ModelLoadError
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.resolve import limit_context
from hippo.service.settings import EngineSettings
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.reference import clip, prefill, prepare, step, user


@pytest.fixture
def copy(target_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to be spoilt."""
    return Path(shutil.copytree(target_checkpoint, tmp_path / "copy"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_loaded_model_says_what_it_is(target_checkpoint: Path) -> None:
    seen: list[tuple[str, float]] = []
    model = load_model(
        LoadPlan(str(target_checkpoint), num_slots=2, max_context_length=64),
        progress=lambda stage, share: seen.append((stage, share)),
    )
    info = model.info
    assert (info.name, info.family, info.device, info.dtype) == (
        "tiny-target", "qwen2_5_vl", "cpu", "float32",
    )  # fmt: skip
    assert info.num_token_ids == 268
    assert info.end_token_ids == (262, 260)
    assert (info.num_slots, info.max_context_length) == (2, 64)
    assert info.num_parameters > 100_000
    assert json.loads(info.tokenizer_json)["model"]["type"] == "BPE"
    assert seen[0] == ("loading", 0.0) and seen[-1] == ("loading", 1.0)


@pytest.mark.parametrize(
    "names",
    [("target_checkpoint", "draft_checkpoint"), ("llava_checkpoint", "llava_draft_checkpoint")],
    ids=["qwen2.5-vl", "llava-onevision"],
)
def test_a_pair_with_other_vocabulary_sizes_over_one_tokenizer_fits(
    request: pytest.FixtureRequest, names: tuple[str, str]
) -> None:
    target, draft = (
        load_model(
            LoadPlan(str(request.getfixturevalue(name)), max_context_length=256, served_name=name)
        )
        for name in names
    )
    check_pair(draft.info, target.info)
    assert draft.info.name == names[1]
    for model in (target, draft):
        logits = prefill(model, 0, prepare(model, user(0, "what?"), clip()))
        assert logits.shape == (target.info.num_token_ids,)
        assert model.forward(step(0, 0, 5, 6)).shape == (2, target.info.num_token_ids)


def test_models_with_different_tokenizers_are_refused(
    target_checkpoint: Path, tmp_path: Path
) -> None:
    target = load_model(LoadPlan(str(target_checkpoint), max_context_length=64))
    folder = write_checkpoint(tmp_path / "other", merges=("h e", "i n", "o n", "a t"))
    other = load_model(LoadPlan(str(folder), max_context_length=64))
    assert other.info.num_token_ids == target.info.num_token_ids
    with pytest.raises(IncompatiblePairError, match="different tokenizers"):
        check_pair(other.info, target.info)


@pytest.mark.parametrize(("kind", "fits"), [("image", True), ("video", False)])
def test_models_with_other_limits_of_videos_are_refused(
    target_checkpoint: Path, copy: Path, kind: str, fits: bool
) -> None:
    path = copy / "processor_config.json"
    settings = json.loads(path.read_text())
    settings[f"{kind}_processor"]["size"]["longest_edge"] //= 2
    path.write_text(json.dumps(settings))
    target, other = (
        load_model(LoadPlan(str(folder), max_context_length=64)).info
        for folder in (target_checkpoint, copy)
    )
    if fits:  # the prompts of images are compared request by request
        check_pair(other, target)
    else:
        with pytest.raises(IncompatiblePairError, match="different prompts of a video"):
            check_pair(other, target)


def test_models_that_write_other_texts_between_frames_are_refused(
    target_checkpoint: Path, tmp_path: Path
) -> None:
    target = load_model(LoadPlan(str(target_checkpoint), max_context_length=64)).info
    folder = write_checkpoint(tmp_path / "timed", family="qwen3_vl")
    timed = load_model(LoadPlan(str(folder), max_context_length=64)).info
    assert timed.tokenizer_hash == target.tokenizer_hash
    with pytest.raises(IncompatiblePairError, match="different prompts of a video"):
        check_pair(timed, target)


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "limit"),
    [("target_checkpoint", "bfloat16", 0.05), ("llava_checkpoint", "float16", 0.005)],
)
def test_narrower_weights_stay_near_float32(
    request: pytest.FixtureRequest, checkpoint: str, dtype: str, limit: float
) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    results = []
    for name in ("float32", dtype):
        model = load_model(LoadPlan(str(folder), dtype=name, max_context_length=256))
        assert model.info.dtype == name
        first = prefill(model, 0, prepare(model, user(0, "what?"), clip()))
        rows = model.forward(step(0, 0, 5, 6, 7))
        results.append(torch.cat((first[None], rows)))
    difference = (results[0] - results[1]).norm() / results[0].norm()
    assert 0 < difference < limit


def test_end_tokens_fall_back_to_the_tokenizers(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    change_config(copy, text_config=_without(copy, "eos_token_id"))
    assert load_model(LoadPlan(str(copy), max_context_length=64)).info.end_token_ids == (262,)


def test_a_window_counts_where_the_configuration_does_not_list_the_layers() -> None:
    text = SimpleNamespace(sliding_window=128, max_position_embeddings=4096)  # Mistral's form
    assert limit_context("m", text, None) == limit_context("m", text, 128) == 128
    with pytest.raises(ModelLoadError, match="sliding window of 128 tokens"):
        limit_context("m", text, 129)
    text.layer_types = ["full_attention"]
    assert limit_context("m", text, None) == 4096


def _without(folder: Path, key: str) -> dict[str, object]:
    text: dict[str, object] = json.loads((folder / "config.json").read_text())["text_config"]
    return text | {key: None}


@pytest.mark.parametrize("name", ["max_video_pixels", "max_image_pixels"])
def test_limits_of_pixels_are_refused_before_weights_are_read(
    llava_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr("hippo.models.load.resolve")
    settings = EngineSettings(model=str(llava_checkpoint), **{name: 50_000})  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"frames of one size.*leave out --max-video-pixels"):
        load_model(settings.load_plan)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "some/deep/path"])
def test_a_missing_folder_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(LoadPlan(name))


def test_a_folder_without_a_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_model(LoadPlan(str(tmp_path)))


def test_an_unsupported_architecture_names_the_supported_ones(copy: Path) -> None:
    change_config(copy, model_type="llama")
    with pytest.raises(
        ModelLoadError, match=r"'llama'; supported: internvl, llava_onevision, qwen2_5_vl"
    ):
        load_model(LoadPlan(str(copy)))


def test_absent_weights_are_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks the weight file model\.safetensors"):
        load_model(LoadPlan(str(copy)))


@pytest.mark.parametrize("size", [4, 1000, -1])
def test_weights_cut_short_are_damaged(copy: Path, size: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match="damaged or cut short"):
        load_model(LoadPlan(str(copy)))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "down_proj" in name)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing or of another shape: .*down_proj"):
        load_model(LoadPlan(str(copy)))


def test_a_broken_tokenizer_is_reported(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer or processor cannot be read"):
        load_model(LoadPlan(str(copy)))


def test_a_model_that_does_not_fit_says_what_it_needs_and_what_helps(
    target_checkpoint: Path,
) -> None:
    with pytest.raises(ModelLoadError, match=r"needs about .* GiB .*lower --slots"):
        load_model(LoadPlan(str(target_checkpoint), num_slots=1000, max_context_length=10_000_000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda:7"}, "no CUDA device|only . CUDA"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"dtype": "int3"}, "use float32, bfloat16, float16 or auto"),
        ({"num_slots": 0}, "--slots is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    target_checkpoint: Path, options: dict[str, str | int], said: str
) -> None:
    with pytest.raises((ModelLoadError, SettingsError), match=said):
        load_model(LoadPlan(str(target_checkpoint), **options))  # type: ignore[arg-type]


HUB_SCRIPT = """
import sys
from hippo.service.settings import EngineSettings
from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import find_checkpoint
for name in sys.argv[1:]:
    try:
        find_checkpoint(name, progress=lambda stage, share: None)
    except ModelLoadError as error:
        sys.stdout.write(f"{error}\\n")
"""


def run_with_hub(hub: str, cache: Path, *names: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, *names],
        env={"HF_ENDPOINT": hub, "HF_HOME": str(cache), "PATH": "", **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_what_a_hub_refuses_is_explained(tmp_path: Path, hub: str) -> None:
    gated, missing, private, broken = run_with_hub(
        hub, tmp_path, "org/gated", "org/missing", "org/private", "org/broken"
    )
    assert "org/gated is gated" in gated and "HF_TOKEN" in gated
    assert "neither a folder here nor a repository" in missing
    assert "refused (403)" in private and "HF_TOKEN" in private
    assert "HTTP status 418" in broken


def test_an_unreachable_hub_is_explained(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    unreachable, invalid = run_with_hub(nowhere, tmp_path, "org/model", "not a name!")
    (offline,) = run_with_hub(nowhere, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert "cannot be reached" in unreachable
    assert "HF_HUB_OFFLINE" in offline
    assert "neither a folder here nor a valid repository name" in invalid


def test_a_repository_is_checked_and_then_downloaded_with_progress(
    tmp_path: Path, hub: str, target_checkpoint: Path
) -> None:
    script = """
import os
from pathlib import Path
from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import find_checkpoint
def refuse(checkpoint):
    raise ModelLoadError(f"{checkpoint.name} is a {checkpoint.model_type}")
try:
    find_checkpoint("org/model", progress=lambda stage, share: None, check=refuse)
except ModelLoadError as error:
    assert error.message == "org/model is a qwen2_5_vl"
assert list(Path(os.environ["HF_HOME"]).rglob("config.json"))
assert not list(Path(os.environ["HF_HOME"]).rglob("*.safetensors"))
shares = []
found = find_checkpoint("org/model", progress=lambda stage, share: shares.append(share))
assert found.name == "org/model" and found.num_floats > 100_000
assert shares[0] == 0.0 and shares[-1] == 1.0, shares
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
