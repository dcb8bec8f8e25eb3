"""A model whose layers have states: what a prefill goes on from, rollbacks, failures, float32."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.errors import HippoError, ModelLoadError
from hippo.models.attention.tap import most_reused
from hippo.models.cached import CachedModel
from hippo.models.interface.base import AttentionTap, Prompt, SequenceRows, StepPlan
from hippo.models.interface.checkpoint import find_checkpoint
from hippo.models.interface.content import cached_rows
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import check_form
from hippo.parallel.help_source import HelpedSource
from hippo.types import ChatMessage, FramePlan, TextPart
from tests.support.devices.pretend_cuda import PretendTensor, pretend_cuda
from tests.support.models.families import write_family
from tests.support.models.pairs import load
from tests.support.models.reference import (
    Reference,
    assert_close,
    clip,
    prefill,
    prepare,
    step,
    user,
)

QUESTIONS = ("what is in the thing?", "the man in the hat: who?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("hybrid") / "tiny", "qwen3_5")


@pytest.fixture(scope="module")
def hybrid(folder: Path) -> CachedModel:
    return load(folder, num_slots=3)


def two_prompts(model: CachedModel) -> tuple[Prompt, Prompt, int]:
    """Two questions about a clip, and how many rows they share."""
    one, other = (prepare(model, user(0, text), clip()) for text in QUESTIONS)
    return one, other, cached_rows(one).common_length(cached_rows(other))


def end_of_video(prompt: Prompt) -> int:
    return int(prompt.visual_indices[-1]) + 1


def test_it_generates_what_transformers_generates(folder: Path, hybrid: CachedModel) -> None:
    reference = Reference(folder)
    messages, media = user(0, QUESTIONS[0]), [clip()]
    inputs = reference.inputs(messages, media)
    own = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.0}
    with torch.no_grad():
        expected = reference.model.generate(**inputs, **own)[0, inputs["input_ids"].shape[1] :]
    token_id = int(prefill(hybrid, 0, prepare(hybrid, messages, *media)).argmax())
    found = [token_id]
    for place in range(len(expected) - 1):
        found.append(int(hybrid.forward(step(0, place, found[-1])).argmax()))
    assert found == expected.tolist()


def test_a_second_question_goes_on_at_the_end_of_the_video(hybrid: CachedModel) -> None:
    one, other, length = two_prompts(hybrid)
    expected = prefill(hybrid, 0, other)
    prefill(hybrid, 1, one)
    hybrid.forward(step(1, 0, 40, 41, 42))
    num_reused = hybrid.reusable_rows(1, length)
    assert num_reused == end_of_video(other) <= length
    assert_close(prefill(hybrid, 1, other, num_reused=num_reused, is_blind=True), expected)


def test_the_same_question_goes_on_at_its_end(hybrid: CachedModel) -> None:
    prompt, _, _ = two_prompts(hybrid)
    expected = prefill(hybrid, 1, prompt)
    hybrid.forward(step(1, 0, 40, 41, 42))
    num_reused = hybrid.reusable_rows(1, prompt.length - 1)
    assert num_reused == int(prompt.question_indices[-1]) + 1
    assert_close(prefill(hybrid, 1, prompt, num_reused=num_reused, is_blind=True), expected)


def test_a_text_goes_on_before_its_last_row(hybrid: CachedModel) -> None:
    prompt = prepare(hybrid, user("what is in the thing?"))
    expected, end = prefill(hybrid, 1, prompt), prompt.length - 1
    hybrid.forward(step(1, 0, 40, 41, 42))
    assert hybrid.reusable_rows(1, end) == end
    assert_close(prefill(hybrid, 1, prompt, num_reused=end), expected)


def test_a_second_turn_goes_on_behind_the_answer(hybrid: CachedModel) -> None:
    turns = [
        *user(0, "what?"),
        ChatMessage("assistant", (TextPart("the thing in the hat"),)),
        *user("and then?"),
    ]
    one = hybrid.prepare_prompt(turns[:1], [clip()], FramePlan())
    more = hybrid.prepare_prompt(turns, [clip()], FramePlan())
    expected = prefill(hybrid, 0, more)
    prefill(hybrid, 1, one)
    answer = more.input_ids[one.length : one.length + 6].tolist()
    for start in (0, 2, 4):  # in blocks, with a draft token that is rolled back
        hybrid.forward(step(1, start, *answer[start : start + 2], 40))
    num_reused = one.length + 6
    assert hybrid.reusable_rows(1, num_reused) == num_reused
    hybrid.copy_rows(1, 2, num_reused)
    for slot in (1, 2):
        assert_close(prefill(hybrid, slot, more, num_reused=num_reused), expected)
        hybrid.forward(step(slot, 0, 40))
        again = hybrid.reusable_rows(slot, more.length - 1)
        assert again == int(more.question_indices[-1]) + 1
        assert hybrid.reusable_rows(slot, again - 1) == end_of_video(more)


def test_a_prefill_that_is_left_leaves_what_it_began_with(hybrid: CachedModel) -> None:
    one, other, length = two_prompts(hybrid)
    expected = prefill(hybrid, 0, one)
    prefill(hybrid, 1, one)
    num_reused = hybrid.reusable_rows(1, length)
    for num_pieces in range(1, 4):
        left = hybrid.prefill(1, other, None, None, None, num_reused)
        for _ in range(num_pieces):
            assert next(left) is None
        left.close()
        assert hybrid.reusable_rows(1, length) == num_reused
        assert_close(prefill(hybrid, 1, one, num_reused=num_reused, is_blind=True), expected)


@pytest.mark.parametrize("chunk_rows", [2048, 7], ids=["whole", "in chunks"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_layers_with_states_score_nothing(
    hybrid: CachedModel, chunk_rows: int, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = two_prompts(hybrid)
    taps = [AttentionTap(num_layers), AttentionTap(num_layers)]
    prefill(hybrid, 0, other, tap=taps[0])
    prefill(hybrid, 1, one)
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    num_reused = hybrid.reusable_rows(1, most_reused(taps[1], other))
    assert num_reused == end_of_video(other)
    prefill(hybrid, 1, other, num_reused=num_reused, tap=taps[1], is_blind=True)
    expected, actual = (tap.layer_scores for tap in taps)
    assert expected is not None and actual is not None and len(expected) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


def test_a_step_that_fails_in_a_later_layer_is_run_again(
    hybrid: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, _, _ = two_prompts(hybrid)
    plans = [step(1, 0, 40, 41, 42), step(1, 2, 43, 44), step(1, 4, 45)]
    prefill(hybrid, 1, prompt)
    expected = [hybrid.forward(plan) for plan in plans]
    prefill(hybrid, 1, prompt)
    last = hybrid._stack._layers[-1]
    for plan, logits in zip(plans, expected, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(last, "_rule", None)
            with pytest.raises(AttributeError):
                hybrid.forward(plan)
        assert_close(hybrid.forward(plan), logits)


def test_a_step_beyond_what_is_logged_is_refused(hybrid: CachedModel) -> None:
    prompt, _, _ = two_prompts(hybrid)
    prefill(hybrid, 0, prompt)
    hybrid.forward(step(0, 0, 40, 41, 42))
    hybrid.forward(step(0, 2, 43))
    with pytest.raises(HippoError, match="the states are kept from row"):
        hybrid.forward(step(0, 1, 41))
    prefill(hybrid, 0, prompt)
    rows = SequenceRows(0, 0, (40, 41, 42), least_start=0)
    hybrid.forward(StepPlan((rows,)))
    hybrid.forward(StepPlan((dataclasses.replace(rows, start_index=2),)))
    hybrid.forward(step(0, 1, 41))


def test_exact_rows_have_the_same_bits_in_every_block(folder: Path) -> None:
    model = load(folder, exact_rows=5)
    prompt, _, _ = two_prompts(model)
    ids = tuple(range(40, 52))
    prefill(model, 0, prompt)
    alone = torch.cat([model.forward(step(0, i, token)).clone() for i, token in enumerate(ids)])
    prefill(model, 0, prompt)
    blocks, start = [], 0
    for count in (3, 1, 7, 1):
        logits = model.forward(step(0, start, *ids[start : start + count], 200, 201))
        blocks.append(logits[:count].clone())
        start += count
    assert torch.equal(torch.cat(blocks), alone)


def test_a_gpus_numbers_are_those_of_the_cpu_and_the_host_waits_for_none(
    folder: Path, hybrid: CachedModel
) -> None:
    one, other, length = two_prompts(hybrid)
    rows = SequenceRows(1, 0, tuple(range(40, 46)), least_start=0)
    plans = [
        StepPlan((SequenceRows(0, 0, (40, 41, 42)), rows)),
        StepPlan((SequenceRows(0, 2, (43,)), dataclasses.replace(rows, start_index=4))),
    ]

    def run(model: CachedModel) -> Iterator[torch.Tensor]:
        visual = model.embed_visual(one)
        for slot in (0, 1):
            *_, logits = model.prefill(slot, one, visual, None)
            assert logits is not None
            yield logits
        for plan in plans:
            yield model.forward(plan).clone()
        num_reused = model.reusable_rows(0, length)
        assert num_reused == end_of_video(one)
        model.copy_rows(0, 2, num_reused)
        tap = AttentionTap(2)
        *_, logits = model.prefill(2, other, None, None, tap, num_reused)
        assert logits is not None and tap.layer_scores is not None
        yield from (logits, tap.layer_scores)

    expected = list(run(hybrid))
    with pretend_cuda() as waits:
        there = load(folder, device="cuda", num_slots=3)
        waits.clear()
        for found, numbers in zip(run(there), expected, strict=True):
            assert waits == []
            assert isinstance(found, PretendTensor)
            torch.testing.assert_close(found.numbers, numbers, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel": 2}, "leave --tensor-parallel out"),
        ({"first_layers": 1}, "leave --prefill-helper-layers out"),
        ({"quantization": "int8"}, "leave --quantization out"),
        ({"cuda_graphs": "on", "device": "cuda"}, "leave --cuda-graphs on out"),
    ],
)
def test_what_does_not_go_with_states_is_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    plan = LoadPlan(str(folder), **changes)
    check = partial(check_form, plan, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match=said):
        find_checkpoint(plan.model, progress=lambda _stage, _share: None, check=check)


def test_a_helper_is_left_out_unless_its_layers_are_named(folder: Path) -> None:
    plan = LoadPlan(str(folder), dtype="float32", max_context_length=512)
    helper = plan.for_helper(device="cpu", cpu_core=None)
    for num_layers in (None, 1):
        source = HelpedSource(plan, helper, num_layers=num_layers)
        try:
            if num_layers is None:
                model = source.load(lambda _stage, _share: None)
                assert prefill(model, 0, prepare(model, user("what?"))).isfinite().all()
            else:
                with pytest.raises(ModelLoadError, match="leave --prefill-helper-layers out"):
                    source.load(lambda _stage, _share: None)
        finally:
            source.close()
