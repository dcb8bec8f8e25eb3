"""The rest of a prompt that runs in other sequences' forward is what a prefill makes of it,
float32."""

from __future__ import annotations

import pytest
import torch

from hippo.models.base import AttentionTap, Prompt, PromptTail, SequenceRows, StepPlan
from hippo.models.base import VideoLanguageModel as Model
from hippo.models.content import cached_rows
from tests.support.reference import clip, prepare, user

LAYERS = 2  # that a tap scores


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("num_running", [1, 2])
def test_a_tail_fills_its_slot_and_changes_nothing_else(
    family: Model, slot: int, num_running: int
) -> None:
    before, prompt = (prepare(family, user(0, text), clip()) for text in ("what?", "who is it?"))
    running = [one for one in range(3) if one != slot][:num_running]
    fed = tuple(
        SequenceRows(one, 0, tuple(range(5, 7 + 2 * index))) for index, one in enumerate(running)
    )
    for index, one in enumerate(running):
        prefill(family, one, prepare(family, user(0, "see" * (1 + index)), clip(seed=1 + index)))
    alone = family.forward(StepPlan(fed))
    tap = AttentionTap(LAYERS)
    first = prefill(family, slot, prompt, tap=tap)
    then = family.forward(StepPlan((SequenceRows(slot, 0, (8, 9)),)))

    prefill(family, slot, before)
    num_shared = cached_rows(before).common_length(cached_rows(prompt))
    num_reused = min(num_shared, int(prompt.question_indices[0]))
    joined_tap = AttentionTap(LAYERS)
    told: list[torch.Tensor | None] = []
    tail = PromptTail(
        slot, prompt, num_reused, joined_tap, lambda: told.append(joined_tap.layer_scores)
    )
    logits = family.forward(plan := StepPlan(fed, (tail,)))

    assert plan.num_rows == alone.shape[0] + prompt.length - num_reused
    assert_close(logits, torch.cat((alone, first[None])))
    assert joined_tap.layer_scores is not None and tap.layer_scores is not None
    assert_close(joined_tap.layer_scores, tap.layer_scores)
    assert told == [joined_tap.layer_scores], "once, when the scores are there"
    assert_close(family.forward(StepPlan((SequenceRows(slot, 0, (8, 9)),))), then)


def test_a_prompt_without_media_joins_as_a_whole(family: Model) -> None:
    prefill(family, 0, prepare(family, user(0, "see"), clip()))
    prompt = prepare(family, user("what is a thing?"))
    fed = (SequenceRows(0, 0, (5,)),)
    logits = family.forward(StepPlan(fed, (PromptTail(1, prompt, 0),)))
    assert_close(logits[-1], prefill(family, 2, prompt))


def test_several_tails_each_with_its_own_tap(family: Model) -> None:
    before = prepare(family, user(0, "see"), clip())
    for slot in range(3):
        prefill(family, slot, before)
    fed = (SequenceRows(1, 0, (5, 6)),)
    alone = family.forward(StepPlan(fed))
    prompts = [prepare(family, user(0, text), clip()) for text in ("what?", "a man or a hat?")]
    taps = [AttentionTap(LAYERS) for _ in prompts]
    tails = tuple(
        PromptTail(slot, prompt, int(prompt.question_indices[0]), tap)
        for slot, prompt, tap in zip((2, 0), prompts, taps, strict=True)
    )
    logits = family.forward(StepPlan(fed, tails))
    assert_close(logits[:2], alone)
    for prompt, tap, row in zip(prompts, taps, logits[2:], strict=True):
        expected = AttentionTap(LAYERS)
        assert_close(row, prefill(family, 1, prompt, tap=expected))
        assert tap.layer_scores is not None and expected.layer_scores is not None
        assert_close(tap.layer_scores, expected.layer_scores)


def prefill(
    model: Model, slot: int, prompt: Prompt, *, tap: AttentionTap | None = None
) -> torch.Tensor:
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), None, tap)
    assert logits is not None
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)
