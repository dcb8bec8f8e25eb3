"""Loading checkpoints: what is served, and what is said when they cannot be."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
from tests.support.models.hub import run_with_hub


@pytest.fixture
def copy(target_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_checkpoint, tmp_path / "copy"))


def change_json(path: Path, **values: object) -> None:
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
    assert seen == sorted(seen)
    assert sum(0.1 < share < 0.8 for _, share in seen) > 50, "weight by weight"


def test_end_tokens_fall_back_to_the_tokenizers(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    text = json.loads((copy / "config.json").read_text())["text_config"]
    change_json(copy / "config.json", text_config=text | {"eos_token_id": None})
    assert load_model(LoadPlan(str(copy), max_context_length=64)).info.end_token_ids == (262,)


def test_a_window_counts_where_the_configuration_does_not_list_the_layers() -> None:
    text = SimpleNamespace(sliding_window=128, max_position_embeddings=4096)  # Mistral's form
    assert limit_context("m", text, None) == limit_context("m", text, 128) == 128
    with pytest.raises(ModelLoadError, match="sliding window of 128 tokens"):
        limit_context("m", text, 129)
    text.layer_types = ["full_attention"]
    assert limit_context("m", text, None) == 4096


def halve_pixels(folder: Path, kind: str) -> None:
    path = folder / "processor_config.json"
    processor = json.loads(path.read_text())[f"{kind}_processor"]
    processor["size"]["longest_edge"] //= 2
    change_json(path, **{f"{kind}_processor": processor})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (partial(write_checkpoint, merges=("h e", "i n", "o n", "a t")), "different tokenizers"),
        (partial(write_checkpoint, family="qwen3_vl"), "different prompts of a video"),
        (partial(halve_pixels, kind="video"), "different prompts of a video"),
        (partial(halve_pixels, kind="image"), None),  # which are compared request by request
    ],
    ids=["tokenizer", "texts between frames", "videos", "images"],
)
def test_a_draft_that_would_not_read_what_the_target_reads_is_refused(
    target_checkpoint: Path, copy: Path, change: Callable[[Path], object], said: str | None
) -> None:
    change(copy)
    target, other = (
        load_model(LoadPlan(str(folder), max_context_length=64)).info
        for folder in (target_checkpoint, copy)
    )
    with pytest.raises(IncompatiblePairError, match=said) if said else nullcontext():
        check_pair(other, target)


def shorten(folder: Path, size: int, name: str = "model.safetensors") -> None:
    """Cuts the file, or removes it."""
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if size:
        (folder / name).write_bytes(content[:size])


def change_weights(folder: Path, *, drop: str = "none", **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if not key.endswith(drop)}
    layer = "model.language_model.layers.0."
    weights |= {layer + key.replace("__", "."): value for key, value in added.items()}
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (partial(shorten, name="config.json", size=0), r"has no config\.json"),
        (
            lambda folder: change_json(folder / "config.json", model_type="llama"),
            "'llama'; supported: internvl, llava_onevision, qwen2_5_vl",
        ),
        (partial(shorten, size=0), r"lacks the weight file model\.safetensors"),
        *((partial(shorten, size=size), "damaged or cut short") for size in (4, 1000, -1)),
        (
            partial(change_weights, drop="0.mlp.down_proj.weight"),
            r"missing or of another shape: .*down_proj",
        ),
        (
            partial(change_weights, mlp__gate__weight=torch.zeros(2)),
            r"not in the model: .*layers\.0\.mlp\.gate\.weight",
        ),
        (partial(shorten, name="tokenizer.json", size=1), "tokenizer or processor cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(
    copy: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(copy)
    with pytest.raises(ModelLoadError, match=said):
        load_model(LoadPlan(str(copy), max_context_length=64))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "some/deep/path"])
def test_a_missing_folder_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(LoadPlan(name))


def test_buffers_of_older_versions_and_scales_of_activations_are_left_out(copy: Path) -> None:
    change_weights(
        copy,
        self_attn__rotary_emb__inv_freq=torch.zeros(8),
        self_attn__q_proj__input_scale=torch.ones(1),
        self_attn__k_scale=torch.ones(1),
    )
    load_model(LoadPlan(str(copy), max_context_length=64))


@pytest.mark.parametrize("name", ["max_video_pixels", "max_image_pixels"])
def test_limits_of_pixels_are_refused_before_weights_are_read(
    llava_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr("hippo.models.load.resolve")
    settings = EngineSettings(model=str(llava_checkpoint), **{name: 50_000})  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"frames of one size.*leave out --max-video-pixels"):
        load_model(settings.load_plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda:7"}, "no CUDA device|only . CUDA"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"dtype": "int3"}, "use float32, bfloat16, float16 or auto"),
        ({"num_slots": 0}, "--slots is 0"),
        (
            {"num_slots": 1000, "max_context_length": 10_000_000},
            "needs about .* GiB .*lower --slots",
        ),
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


def refusals(hub: str, cache: Path, *names: str, **env: str) -> list[str]:
    return run_with_hub(hub, cache, HUB_SCRIPT, *names, **env).stdout.splitlines()


def test_what_a_hub_refuses_is_explained(tmp_path: Path, hub: str) -> None:
    gated, missing, private, broken = refusals(
        hub, tmp_path, "org/gated", "org/missing", "org/private", "org/broken"
    )
    assert "org/gated is gated" in gated and "HF_TOKEN" in gated
    assert "neither a folder here nor a repository" in missing
    assert "refused (403)" in private and "HF_TOKEN" in private
    assert "HTTP status 418" in broken


def test_an_unreachable_hub_is_explained(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    unreachable, invalid = refusals(nowhere, tmp_path, "org/model", "not a name!")
    (offline,) = refusals(nowhere, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert "cannot be reached" in unreachable
    assert "HF_HUB_OFFLINE" in offline
    assert "neither a folder here nor a valid repository name" in invalid


def test_a_repository_is_checked_and_then_downloaded_with_progress(
    tmp_path: Path, hub: str
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
    run_with_hub(hub, tmp_path, script)
