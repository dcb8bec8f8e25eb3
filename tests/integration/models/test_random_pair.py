"""Random pairs walk along their tables, and their configurations are the published ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.shapes.random_pair import LETTERS, PairForm, answer_tables, write_pair
from hippo.catalog.shapes import find_shape
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.resolve import import_transformers
from tests.support.models.hub_forms import write_qwen_files
from tests.support.models.quantized import has_packages
from tests.support.models.reference import prefill, prepare, step, user

_TARGET, _DRAFT = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
_SHARES = (0.8, 0.9)
_NUM_TOKENS = 30


def _prefill(model: VideoLanguageModel, letter: str) -> tuple[int, int]:
    """The prompt's last token, and the token that the model answers."""
    prompt = prepare(model, user(f"What happens? {letter}"))
    return int(prompt.input_ids[-1]), int(prefill(model, 0, prompt).argmax())


def _step(model: VideoLanguageModel, index: int, token: int) -> int:
    """The model's token after ``token``, which is fed at the index of the answer."""
    return int(model.forward(step(0, index, token))[-1].argmax())


@pytest.mark.parametrize("target_form", [None, "unsloth bnb-4bit"])
def test_an_answer_is_a_cycle_on_which_the_draft_agrees_at_the_chosen_share(
    tmp_path: Path, target_form: str | None
) -> None:
    if target_form is not None and not has_packages():
        pytest.skip("the group quantized is not installed")
    form = PairForm(_TARGET, _DRAFT, _SHARES, target_form=target_form, is_published_size=False)
    lines: list[str] = []
    folders = write_pair(tmp_path, form, progress=lines.append)
    target, draft = (load_model(LoadPlan(str(folder), dtype="bfloat16")) for folder in folders)
    assert target.info.tokenizer_hash == draft.info.tokenizer_hash
    assert lines[-1].startswith("wrote draft")
    for letter, share in zip(LETTERS, _SHARES, strict=False):
        walk = list(_prefill(target, letter))
        for index in range(_NUM_TOKENS - 1):
            walk.append(_step(target, index, walk[-1]))
        assert len(set(walk)) == len(walk)  # no token comes twice
        drafted = [_prefill(draft, letter)[1], *(_step(draft, 0, token) for token in walk[1:-1])]
        num_equal = sum(one == other for one, other in zip(drafted, walk[1:], strict=True))
        assert num_equal == pytest.approx(share * _NUM_TOKENS, abs=3)


def test_each_model_can_be_written_alone_and_over_an_earlier_one(tmp_path: Path) -> None:
    form = PairForm(_TARGET, _DRAFT, _SHARES, is_published_size=False)
    together = write_pair(tmp_path / "together", form)
    alone = tmp_path / "alone"
    (alone / "draft").mkdir(parents=True)
    write_pair(alone, form, roles=("target",))
    assert not list((alone / "draft").iterdir())
    write_pair(alone, form, roles=("draft",))
    for folder in together:
        for file in folder.iterdir():
            assert (alone / folder.name / file.name).read_bytes() == file.read_bytes(), file


def test_the_share_is_exact_in_every_hundred_ids() -> None:
    vocabulary = {"a": 0, **{f"Ġw{number}": number + 1 for number in range(1000)}}
    target, draft = answer_tables(vocabulary, 501, (0.93,))
    assert len(target.ids) == 501
    assert torch.equal(target.ids, draft.ids)
    agrees = target.next_ids == draft.next_ids
    assert [int(part.sum()) for part in torch.split(agrees[:500], 100)] == [93] * 5


@pytest.mark.parametrize("size", ["3B", "7B", "32B", "72B"])
def test_published_files_describe_a_model_with_as_many_parameters_as_published(
    size: str, tmp_path: Path
) -> None:
    transformers = import_transformers()
    name = f"Qwen/Qwen2.5-VL-{size}-Instruct"
    tokenizer = write_qwen_files(tmp_path / "model", name, is_published_size=True)
    assert len(tokenizer) == 151_665
    with torch.device("meta"):
        config: Any = transformers.AutoConfig.from_pretrained(tmp_path / "model")
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.tie_weights()
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert num_parameters == pytest.approx(find_shape(name).num_parameters, rel=1e-3)
    rope = config.text_config.rope_parameters
    assert sum(rope["mrope_section"]) == 64
