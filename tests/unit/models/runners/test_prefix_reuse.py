"""Which rows two sequences share, and a prefill that goes on behind them, float32."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch

from hippo.models.attention.tap import most_reused
from hippo.models.interface.base import AttentionTap, Prompt
from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.models.interface.content import CachedRows, cached_places, cached_rows, salted
from hippo.types import ChatMessage, FramePlan, TextPart
from tests.support.models.pairs import load
from tests.support.models.reference import assert_close, clip, image, prefill, prepare, step, user

QUESTIONS = ("what is in the thing?", "the man in the hat: who?")


def two_prompts(family: Model) -> tuple[Prompt, Prompt, int]:
    """Two questions about a clip, and how many rows they share."""
    one, other = (prepare(family, user(0, text), clip()) for text in QUESTIONS)
    return one, other, shared(one, other)


def shared(one: Prompt, other: Prompt) -> int:
    return cached_rows(one).common_length(cached_rows(other))


def test_two_questions_about_a_clip_share_all_rows_up_to_the_question(family: Model) -> None:
    one, other, length = two_prompts(family)
    assert int(one.visual_indices[-1]) < length <= int(one.question_indices[0])
    expected = prefill(family, 0, other)
    prefill(family, 1, one)
    family.forward(step(1, 0, 40, 41, 42))
    assert_close(prefill(family, 1, other, num_reused=length, is_blind=True), expected)


def test_what_is_shared_ends_with_the_first_item_that_differs(family: Model) -> None:
    one, *others = (
        prepare(family, user("see", 0, "and", 1, "?"), clip(seed=first), clip(seed=second))
        for first, second in ((0, 1), (2, 1), (0, 2))
    )
    for other, item in zip(others, one.items, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert shared(one, other) == int(item.places[0])


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
    model = load(target_checkpoint)
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
        columns = rows.table.t().tolist()
        return [(*each, rows.digests[each[1]] if each[1] >= 0 else None) for each in columns]

    for _ in range(50):
        one, other = some(), some()
        pairs = zip(contents(one), contents(other), strict=False)
        expected = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
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
    expected = prefill(family, 0, prompt, kept=kept)
    following = family.forward(step(0, 0, *range(40, 45)))
    prefill(family, 1, prompt, kept=kept)
    num_reused = cut % num_rows
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    assert_close(prefill(family, 1, prompt, num_reused=num_reused, kept=kept), expected)
    assert_close(family.forward(step(1, 0, *range(40, 45))), following)


def test_a_second_turn_goes_on_behind_the_answer_that_was_decoded(family: Model) -> None:
    turns = [
        *user(0, "what?"),
        ChatMessage("assistant", (TextPart("the thing in the hat"),)),
        *user("and then?"),
    ]
    one = family.prepare_prompt(turns[:1], [clip()], FramePlan())
    more = family.prepare_prompt(turns, [clip()], FramePlan())
    expected = prefill(family, 0, more)
    prefill(family, 1, one)
    answer = more.input_ids[one.length : one.length + 6].tolist()
    held = cached_rows(one).followed_by(answer, one.next_position)
    assert held.common_length(cached_rows(more)) == one.length + 6
    other = held.first(one.length).followed_by([answer[0], answer[1] ^ 1], one.next_position)
    assert other.common_length(cached_rows(more)) == one.length + 1
    for start in (0, 2, 4):  # in blocks, with a draft token that is rolled back
        family.forward(step(1, start, *answer[start : start + 2], 40))
    assert_close(prefill(family, 1, more, num_reused=one.length + 6), expected)


@pytest.mark.parametrize("chunk_rows", [2048, 7], ids=["whole", "in chunks"])
@pytest.mark.parametrize(
    "tap",
    [AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(2, is_alignment=True)],
    ids=["visual", "causal", "alignment"],
)
def test_the_early_layers_score_reused_rows_as_computed_ones(
    family: Model, chunk_rows: int, tap: AttentionTap, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, length = two_prompts(family)
    taps = [dataclasses.replace(tap), dataclasses.replace(tap)]
    prefill(family, 0, other, tap=taps[0])
    prefill(family, 1, one)
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    num_reused = min(length, most_reused(tap, other))
    assert num_reused > 0
    is_blind = num_reused > int(other.visual_indices[-1])  # hidden states of visual rows are needed
    assert is_blind is not tap.is_alignment
    prefill(family, 1, other, num_reused=num_reused, tap=taps[1], is_blind=is_blind)
    expected, actual = (tap.layer_scores for tap in taps)
    assert expected is not None and actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


def test_a_prefill_that_is_left_leaves_the_reused_rows_as_they_were(family: Model) -> None:
    one, other, num_reused = two_prompts(family)
    expected = prefill(family, 0, one)
    prefill(family, 1, one)
    left = family.prefill(1, other, None, None, None, num_reused)
    assert next(left) is None
    left.close()
    assert_close(prefill(family, 1, one, num_reused=num_reused, is_blind=True), expected)


def test_a_prefill_goes_on_behind_rows_that_were_copied_from_another_slot(family: Model) -> None:
    one, other, length = two_prompts(family)
    expected = prefill(family, 1, other)
    prefill(family, 1, prepare(family, user(0, "?"), clip(seed=5)))
    before = prefill(family, 0, one)
    family.copy_rows(0, 1, length)
    assert_close(prefill(family, 1, other, num_reused=length, is_blind=True), expected)
    # The slot that they came from is as it was.
    again = prefill(family, 0, one, num_reused=one.length - 1, is_blind=True)
    assert_close(again, before)
