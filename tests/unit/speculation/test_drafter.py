"""What the draft's side feeds, sends and takes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hippo.errors import InvalidRequestError
from hippo.speculation.branches import Proposal
from hippo.speculation.core import Step
from hippo.speculation.drafter import Drafter
from hippo.speculation.sharpness import Sharpness
from hippo.types import Block, Commit, Pace, StepLimits, Timing

END = 99


def make_pace(*, max_ahead: int = 8, block_size: int = 1, num_first: int = 1) -> Pace:
    return Pace(StepLimits(1, 8), StepLimits(num_first, 8), max_ahead, block_size)


def make_drafter(
    *,
    pace: Pace | None = None,
    first_id: int = 10,
    prompt: Sequence[int] = (),
    **options: Any,
) -> Drafter:
    given: dict[str, Any] = {"max_tokens": 100, "end_token_ids": [END], **options}
    drafter = Drafter(pace=pace or make_pace(), **given)
    drafter.set_prompt_text(prompt)
    drafter.begin(first_id)
    return drafter


def make_guessing(*, max_ahead: int = 40, max_guessed: int = 3, **options: Any) -> Drafter:
    return make_drafter(pace=make_pace(max_ahead=max_ahead), max_guessed=max_guessed, **options)


def start(drafter: Drafter) -> Step:
    step = drafter.next_step()
    assert step is not None
    return step


def draft(drafter: Drafter, *ids: int) -> None:
    for token_id in ids:
        drafter.finish_step(start(drafter), [token_id])


def chose(*choices: int) -> Proposal:
    return Proposal(choices[0], choices=choices)


def take(drafter: Drafter) -> Block:
    [block] = drafter.take_messages()
    return block


def test_the_prefills_token_is_the_first_and_is_fed_next() -> None:
    drafter = make_drafter()
    assert take(drafter) == Block(0, 0, (10,))
    assert drafter.next_step() == Step(0, (10,))


def test_the_first_block_of_a_run_is_what_the_idle_target_waits_for() -> None:
    drafter = make_drafter(pace=make_pace(block_size=3, num_first=2))
    assert drafter.take_messages() == []
    draft(drafter, 11)
    assert take(drafter).token_ids == (10, 11)
    draft(drafter, 12, 13)
    assert drafter.take_messages() == []
    drafter.add_commit(Commit(1, 0, (10, 55)))
    draft(drafter, 56)
    assert drafter.take_messages() == []
    draft(drafter, 57)
    assert take(drafter) == Block(1, 2, (56, 57))


def test_a_block_tells_how_long_the_device_waited_since_the_block_before() -> None:
    drafter = make_drafter(pace=make_pace(block_size=2, num_first=3))
    for token_id, wait_ns in ((11, 5), (12, 7)):
        drafter.finish_step(start(drafter), [token_id], Timing(wait_ns=wait_ns))
    assert take(drafter).wait_ns == 5 + 7
    for token_id, wait_ns in ((13, 2), (14, 9)):
        drafter.finish_step(start(drafter), [token_id], Timing(wait_ns=wait_ns))
    assert take(drafter).wait_ns == 2 + 9


def test_drafting_stops_at_max_ahead_and_goes_on_after_a_commit() -> None:
    drafter = make_drafter(pace=make_pace(max_ahead=2, block_size=4, num_first=4))
    draft(drafter, 11)
    assert drafter.next_step() is None
    assert take(drafter).is_exhausted
    drafter.add_commit(Commit(0, 0, (10,)))
    assert drafter.next_step() == Step(1, (11,))


def test_a_new_run_is_sent_from_its_beginning_however_far_the_broken_one_was_sent() -> None:
    drafter = make_drafter(pace=make_pace(block_size=3, num_first=2))
    draft(drafter, 11)
    take(drafter)
    draft(drafter, 12, 13, 14)
    take(drafter)
    drafter.add_commit(Commit(0, 0, (10, 51)))
    draft(drafter, 52)
    assert drafter.take_messages() == []
    draft(drafter, 53)
    assert take(drafter) == Block(1, 2, (52, 53))


def test_a_difference_in_what_was_not_sent_raises_none() -> None:
    drafter = make_drafter(pace=make_pace(block_size=2, num_first=2))
    draft(drafter, 11)
    take(drafter)
    draft(drafter, 12)
    drafter.add_commit(Commit(0, 0, (10, 11, 52)))
    draft(drafter, 53, 54)
    block = take(drafter)
    assert (block.epoch, block.start_index, block.token_ids) == (0, 3, (53, 54))


def test_the_target_waits_for_what_is_sent_again_as_for_a_first_block() -> None:
    drafter = make_drafter(pace=make_pace(block_size=3, num_first=2))
    draft(drafter, 11)
    take(drafter)
    draft(drafter, 12, 13)
    assert drafter.take_messages() == []
    drafter.add_commit(Commit(2, 0, (10, 11)))
    assert take(drafter) == Block(2, 2, (12, 13))


def test_a_draft_that_joins_a_long_answer_feeds_it_in_parts() -> None:
    settled = tuple(range(10, 310))
    drafter = make_drafter(max_tokens=400, committed_ids=settled, epoch=4)
    for first, end in ((0, 128), (128, 256)):
        step = start(drafter)
        assert step == Step(first, settled[first:end])
        assert tuple(drafter.history(step)) == settled[:end]
        assert drafter.finish_step(step, [999]) == 0  # the settled id there is another
        assert drafter.take_messages() == []
    drafter.add_commit(Commit(4, 300, (310, 311)))  # the answer goes on meanwhile
    step = start(drafter)
    assert step == Step(256, (*settled[256:], 310, 311))
    assert drafter.finish_step(step, [312]) == 1
    assert take(drafter) == Block(4, 302, (312,))


def test_a_draft_at_rest_does_nothing_until_the_pace_changes() -> None:
    drafter = make_drafter(pace=Pace())
    assert drafter.next_step() is None
    assert drafter.take_messages() == []
    drafter.add_commit(Commit(0, 0, (10, 11)))
    assert drafter.next_step() is None
    drafter.receive(make_pace())
    assert drafter.next_step() == Step(0, (10, 11))


def test_a_commit_after_a_gap_is_refused() -> None:
    drafter = make_drafter()
    with pytest.raises(InvalidRequestError, match="without a gap"):
        drafter.add_commit(Commit(0, 1, (11,)))


def test_a_guess_is_kept_as_far_as_the_draft_itself_says_the_same() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13, 14])
    step = start(drafter)
    assert (step.token_ids, step.guess, step.first_index) == ((10, 11, 12, 13), (11, 12, 13), 1)
    assert drafter.finish_step(step, [11, 12, 77, 78]) == 3
    assert list(drafter.ids) == [10, 11, 12, 77]
    assert start(drafter).token_ids[0] == 77  # what was fed rightly is not fed again


def test_a_guess_follows_the_settled_tokens_and_not_those_of_the_broken_run() -> None:
    drafter = make_guessing(prompt=[7, 8, 60, 61, 9, 8, 70])
    draft(drafter, 11, 12, 13, 14)
    drafter.add_commit(Commit(1, 0, (10, 11, 50, 7, 8)))
    assert start(drafter).guess == (60, 61, 9)  # after 7 and 8; after the last 8 comes 70


def test_a_block_tells_which_tokens_stood_in_a_guess() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13, 14])
    drafter.finish_step(start(drafter), [11, 12, 77, 78])
    block = take(drafter)
    assert (block.token_ids, block.guessed_places) == ((10, 11, 12, 77), (1, 2))
    drafter.add_commit(Commit(1, 0, (10, 50)))  # the guess of 11 was wrong
    step = start(drafter)
    drafter.finish_step(step, [60] * (step.num_guessed + 1))
    assert take(drafter).guessed_places == ()


def test_what_a_broken_run_said_next_is_tried_first() -> None:
    drafter = make_guessing(max_guessed=1)
    draft(drafter, 11, 12, 13, 14, 15)
    take(drafter)
    drafter.add_commit(Commit(1, 0, (10, 51)))
    step = start(drafter)
    assert step == Step(1, (51, 12, 13, 14), num_guessed=3)
    assert drafter.finish_step(step, [12, 13, 88, 89]) == 3
    assert take(drafter).token_ids == (12, 13, 88)


def test_a_broken_run_that_does_not_fit_is_not_tried_in_vain() -> None:
    drafter = make_guessing(max_guessed=1)
    draft(drafter, 11, 12, 13, 14, 15)
    take(drafter)
    drafter.add_commit(Commit(1, 0, (10, 51)))
    assert drafter.finish_step(start(drafter), [88, 89, 90, 91]) == 1
    step = start(drafter)
    assert step.token_ids == (88,)
    assert drafter.finish_step(step, [12]) == 1
    step = start(drafter)
    assert step.token_ids == (12,)
    assert drafter.finish_step(step, [13]) == 1
    assert start(drafter).token_ids == (13, 14, 15)


def test_no_guess_goes_beyond_what_is_to_be_drafted() -> None:
    prompt = [10, 11, 12, 13, 14, 15]
    drafter = make_guessing(prompt=prompt, max_ahead=3)
    step = start(drafter)
    assert step.token_ids == (10, 11)
    assert drafter.finish_step(step, [11, 12]) == 2
    assert drafter.is_exhausted and drafter.next_step() is None
    drafter = make_guessing(prompt=[10, 11, END, 12])
    assert start(drafter).token_ids == (10, 11)


def test_nothing_behind_an_end_token_is_drafted() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    assert drafter.finish_step(start(drafter), [11, END, 13, 14]) == 2
    assert list(drafter.ids) == [10, 11, END]
    assert drafter.next_step() is None


def test_commits_along_a_guess_leave_what_comes_behind_them() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    step = start(drafter)
    drafter.add_commit(Commit(0, 0, (10, 11, 12)))
    assert drafter.finish_step(step, [11, 12, 13, 14]) == 2
    assert list(drafter.ids) == [10, 11, 12, 13, 14]


def test_a_pace_that_stops_the_draft_in_a_step_leaves_it_able_to_go_on() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    step = start(drafter)
    drafter.receive(Pace())
    assert drafter.finish_step(step, [11, 12, 13, 14]) == 1
    assert drafter.next_step() is None
    drafter.receive(make_pace())
    assert start(drafter).token_ids[0] == 11


def test_settled_tokens_up_to_the_first_wrong_one_tell_which_sharpness_is_right() -> None:
    sharpness = Sharpness()
    drafter = make_drafter(sharpness=sharpness)
    for token_id in (11, 12, 13, 14):
        drafter.finish_step(start(drafter), [token_id], notes=[chose(token_id, 0, 50 + token_id)])
    # Right twice, then wrong, where the sharpest would be right. Behind that, the draft's choices
    # follow a wrong token and say nothing.
    drafter.add_commit(Commit(1, 0, (10, 11, 12, 63, 64)))
    assert sharpness.place == 0
    drafter.finish_step(start(drafter), [15], notes=[chose(15, 0, 65)])
    drafter.add_commit(Commit(2, 5, (65,)))
    assert sharpness.place == 2
