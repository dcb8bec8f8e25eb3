"""Which rows two sequences share, and a prefill that goes on behind them, float32."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from hippo.models.attention.tap import most_reused
from hippo.models.interface.base import AttentionTap, Prompt, SequenceRows, StepPlan
from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.models.interface.content import CachedRows, cached_places, cached_rows, salted
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import ChatMessage, FramePlan, TextPart
from tests.support.models.reference import assert_close, clip, image, prepare, user

QUESTIONS = ("what is in the thing?", "the man in the hat: who?")


def run(
    model: Model,
    slot: int,
    prompt: Prompt,
    num_reused: int = 0,
    *,
    kept: torch.Tensor | None = None,
    tap: AttentionTap | None = None,
    is_blind: bool = False,
) -> torch.Tensor:
    visual = None if is_blind else model.embed_visual(prompt)
    *_, logits = model.prefill(slot, prompt, visual, kept, tap, num_reused)
    assert logits is not None
    return logits


def shared(one: Prompt, other: Prompt) -> int:
    return cached_rows(one).common_length(cached_rows(other))


def test_two_questions_about_a_clip_share_all_rows_up_to_the_question(family: Model) -> None:
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    length = shared(one, other)
    assert int(one.visual_indices[-1]) < length <= int(one.question_indices[0])
    assert torch.equal(one.input_ids[:length], other.input_ids[:length])


def test_another_clip_is_shared_up_to_its_first_token(family: Model) -> None:
    one, other = (prepare(family, user("see", 0, "?"), clip(seed=seed)) for seed in (0, 1))
    assert torch.equal(one.input_ids, other.input_ids)
    assert shared(one, other) == int(one.visual_indices[0])


def test_a_second_item_that_differs_ends_what_is_shared(family: Model) -> None:
    one, other = (
        prepare(family, user(0, "and", 1, "?"), clip(), clip(seed=seed)) for seed in (1, 2)
    )
    assert shared(one, other) == int(one.items[1].places[0])


def test_a_conversation_that_goes_on_with_another_kind_of_media_shares_its_beginning(
    family: Model,
) -> None:
    one = prepare(family, user(0, 1, "what?"), image(), image(seed=1))
    turns = [
        *user(0, 1, "what?"),
        ChatMessage("assistant", (TextPart("a thing"),)),
        *user(2, "and now?"),
    ]
    more = family.prepare_prompt(turns, [image(), image(seed=1), clip()], FramePlan())
    # The video, which the images stand before, is the first of the items.
    assert shared(one, more) > int(one.items[-1].places[-1])


def test_frames_at_another_rate_have_other_positions_and_are_shared_that_far(
    target_checkpoint: Path,
) -> None:
    model = load_model(LoadPlan(str(target_checkpoint), dtype="float32", max_context_length=512))
    one, other = (prepare(model, user(0, "?"), clip(fps=fps)) for fps in (2.0, 0.5))
    assert one.items[0].digest == other.items[0].digest
    length = shared(one, other)
    assert torch.equal(one.positions[:, :length], other.positions[:, :length])
    assert int(one.visual_indices[0]) < length <= int(one.visual_indices[-1])


def test_pruned_rows_are_shared_while_the_same_ones_are_kept(family: Model) -> None:
    prompt = prepare(family, user(0, "what?"), clip())
    rows = cached_rows(prompt)

    def pruned(*kept: int) -> CachedRows:
        return rows.at(cached_places(prompt, torch.tensor(kept)))

    first = int(prompt.visual_indices[0])
    places = cached_places(prompt, torch.tensor([0, 3]))
    assert places is not None
    same = int((places < prompt.visual_indices[5]).sum())  # with any text between frames
    assert pruned(0, 3, 5).common_length(pruned(0, 3, 7)) == same >= first + 2
    assert pruned(0, 3, 5).common_length(pruned(0, 3, 5)) == len(pruned(0, 3, 5))
    assert rows.common_length(pruned(0, 1, 2, 4)) == first + 3
    assert pruned(2, 3).common_length(rows) == first


def test_an_answer_and_the_turn_that_quotes_it_share_its_rows(family: Model) -> None:
    turns = [
        *user(0, "what?"),
        ChatMessage("assistant", (TextPart("the thing in the hat"),)),
        *user("and then?"),
    ]
    one = family.prepare_prompt(turns[:1], [clip()], FramePlan())
    more = family.prepare_prompt(turns, [clip()], FramePlan())
    answer = more.input_ids[one.length : one.length + 6].tolist()
    held = cached_rows(one).followed_by(answer, one.next_position)
    assert held.common_length(cached_rows(more)) == one.length + 6
    other = held.first(one.length).followed_by([answer[0], answer[1] ^ 1], one.next_position)
    assert other.common_length(cached_rows(more)) == one.length + 1


def test_salts_share_nothing(family: Model) -> None:
    prompt = prepare(family, user(0, "what?"), clip())
    plain, one, other = (cached_rows(prompt, salt) for salt in ("", "one", "other"))
    assert one.common_length(cached_rows(prompt, "one")) == prompt.length
    assert plain.common_length(one) == one.common_length(other) == 0
    digests = {salted(prompt, salt).items[0].digest for salt in ("", "one", "other")}
    assert len(digests) == 3


@pytest.mark.parametrize("seed", range(20))
def test_the_common_length_is_that_of_comparing_row_by_row(seed: int) -> None:
    chance = random.Random(seed)

    def some() -> CachedRows:
        columns: list[tuple[int, int, int]] = []
        digests: list[bytes] = []
        for _ in range(chance.randrange(1, 5)):
            if chance.random() < 0.5:
                columns.append((chance.randrange(2), -1, -1))
            else:
                columns += [(7, len(digests), offset) for offset in range(chance.randrange(1, 4))]
                digests.append(bytes([chance.randrange(2)]))
        rows = [(*column, place) for place, column in enumerate(columns)]
        return CachedRows("", torch.tensor(rows).t(), tuple(digests))

    def contents(rows: CachedRows) -> list[tuple[object, ...]]:
        return [
            (*column, rows.digests[column[1]] if column[1] >= 0 else None)
            for column in rows.table.t().tolist()
        ]

    for _ in range(50):
        one, other = some(), some()
        expected = 0
        for mine, theirs in zip(contents(one), contents(other), strict=False):
            if mine != theirs:
                break
            expected += 1
        assert one.common_length(other) == expected


@pytest.mark.parametrize(
    ("cut", "chunk_rows", "is_pruned"),
    [
        *((cut, 2048, False) for cut in (1, 9, 30, -40, -2, -1)),
        *((cut, 7, False) for cut in (30, -2)),
        *((cut, 2048, True) for cut in (9, -1)),
        *((cut, 7, True) for cut in (1, -40)),
    ],
)
def test_a_prefill_behind_reused_rows_equals_one_from_the_first(
    family: Model, cut: int, chunk_rows: int, is_pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prepare(family, user(0, "what is in", 1, "the thing?"), clip(), image())
    num_visual = prompt.visual_indices.shape[0]
    kept = torch.arange(0, num_visual, 3) if is_pruned else None
    num_rows = prompt.length - (0 if kept is None else num_visual - kept.shape[0])
    expected = run(family, 0, prompt, kept=kept)
    plan = StepPlan((SequenceRows(0, 0, tuple(range(40, 45))),))
    following = family.forward(plan)
    run(family, 1, prompt, kept=kept)
    num_reused = cut % num_rows
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    assert_close(run(family, 1, prompt, num_reused, kept=kept), expected)
    plan = StepPlan((SequenceRows(1, 0, tuple(range(40, 45))),))
    assert_close(family.forward(plan), following)


def test_another_question_goes_on_behind_the_first_ones_clip_without_its_features(
    family: Model,
) -> None:
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    expected = run(family, 0, other)
    run(family, 1, one)
    family.forward(StepPlan((SequenceRows(1, 0, (40, 41, 42)),)))
    assert_close(run(family, 1, other, shared(one, other), is_blind=True), expected)


def test_a_second_turn_goes_on_behind_the_answer_that_was_decoded(family: Model) -> None:
    turns = [
        *user(0, "what?"),
        ChatMessage("assistant", (TextPart("the thing in the hat"),)),
        *user("and then?"),
    ]
    one = family.prepare_prompt(turns[:1], [clip()], FramePlan())
    more = family.prepare_prompt(turns, [clip()], FramePlan())
    expected = run(family, 0, more)
    run(family, 1, one)
    answer = more.input_ids[one.length : one.length + 6].tolist()
    for start in (0, 2, 4):  # in blocks, with a draft token that is rolled back
        ids = (*answer[start : start + 2], 40)
        family.forward(StepPlan((SequenceRows(1, start, ids),)))
    assert_close(run(family, 1, more, one.length + 6), expected)


@pytest.mark.parametrize("chunk_rows", [2048, 7], ids=["whole", "in chunks"])
@pytest.mark.parametrize(
    "tap",
    [AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(2, is_alignment=True)],
    ids=["visual", "causal", "alignment"],
)
def test_the_early_layers_score_reused_rows_as_computed_ones(
    family: Model, chunk_rows: int, tap: AttentionTap, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    taps = [dataclasses.replace(tap), dataclasses.replace(tap)]
    run(family, 0, other, tap=taps[0])
    run(family, 1, one)
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    num_reused = min(shared(one, other), most_reused(tap, other))
    assert num_reused > 0
    is_blind = num_reused > int(other.visual_indices[-1])  # hidden states of visual rows are needed
    assert is_blind is not tap.is_alignment
    run(family, 1, other, num_reused, tap=taps[1], is_blind=is_blind)
    expected, actual = (tap.layer_scores for tap in taps)
    assert expected is not None and actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


def test_a_prefill_that_is_left_leaves_the_reused_rows_as_they_were(family: Model) -> None:
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    expected = run(family, 0, one)
    run(family, 1, one)
    num_reused = shared(one, other)
    left = family.prefill(1, other, None, None, None, num_reused)
    assert next(left) is None
    left.close()
    assert_close(run(family, 1, one, num_reused, is_blind=True), expected)


def test_rows_of_media_without_their_content_are_a_bug(family: Model) -> None:
    prompt = prepare(family, user(0, "what?"), clip())
    with pytest.raises(AssertionError):
        cached_rows(dataclasses.replace(prompt, items=()))


def test_the_whole_prompt_is_never_reused(family: Model) -> None:
    prompt = prepare(family, user("what?"))
    run(family, 0, prompt)
    with pytest.raises(AssertionError):
        run(family, 0, prompt, prompt.length)


def test_a_prefill_goes_on_behind_rows_that_were_copied_from_another_slot(family: Model) -> None:
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    length = shared(one, other)
    expected = run(family, 1, other)
    run(family, 1, prepare(family, user(0, "?"), clip(seed=5)))
    before = run(family, 0, one)
    family.copy_rows(0, 1, length)
    assert_close(run(family, 1, other, length, is_blind=True), expected)
    # The slot that they came from is as it was.
    again = run(family, 0, one, one.length - 1, is_blind=True)
    assert_close(again, before)
