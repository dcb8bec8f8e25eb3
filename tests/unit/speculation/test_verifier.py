"""What the target's side settles, queues, waits for and drops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hippo.speculation.core import Step, Wait
from hippo.speculation.verifier import Verifier
from hippo.types import Block, Branch, FinishReason, Pace, StepLimits, Timing, Verdict

END = 99


def make_verifier(
    *,
    first_id: int = 10,
    max_tokens: int = 100,
    optimistic: StepLimits | None = None,
    conservative: StepLimits | None = None,
    max_reused: int = 0,
) -> Verifier:
    pace = Pace(
        optimistic or StepLimits(1, 8, 1000),
        conservative or StepLimits(1, 2, 500),
        max_ahead=16,
        max_reused=max_reused,
    )
    verifier = Verifier(max_tokens=max_tokens, end_token_ids=[END], pace=pace)
    begin(verifier, first_id, Timing())
    return verifier


def begin(verifier: Verifier, token_id: int, timing: Timing) -> Verdict:
    verifier.begin(token_id, timing)
    [verdict] = verifier.take_messages()
    return verdict


def finish(verifier: Verifier, step: Step, target_ids: Sequence[int]) -> Verdict:
    verifier.finish_step(step, target_ids, Timing())
    [verdict] = verifier.take_messages()
    return verdict


def start(verifier: Verifier, now_ns: int = 0) -> Step:
    step = verifier.next_step(now_ns)
    assert isinstance(step, Step)
    return step


def verify(verifier: Verifier, *target_ids: int, now_ns: int = 0) -> Verdict:
    return finish(verifier, start(verifier, now_ns), target_ids)


def block(*ids: int, start: int = 1, epoch: int = 0, is_exhausted: bool = False) -> Block:
    return Block(epoch, start, ids, is_exhausted)


def test_the_prefills_token_is_compared_with_the_drafts_first() -> None:
    verifier = Verifier(max_tokens=5, end_token_ids=[], pace=Pace())
    verifier.add_block(block(7, 8, start=0))
    verdict = begin(verifier, 7, Timing(num_rows=30))
    assert verdict == Verdict(0, 0, (7,), timing=Timing(num_rows=30))
    assert len(verifier._run) == 1


def test_a_wrong_first_token_ends_the_run_at_once() -> None:
    verifier = Verifier(max_tokens=5, end_token_ids=[], pace=Pace())
    verifier.add_block(block(7, 8, start=0))
    verdict = begin(verifier, 6, Timing())
    assert (verdict.is_rejection, verdict.num_dropped_tokens, verdict.epoch) == (True, 2, 1)
    assert not verifier._run
    assert verifier.is_conservative


def test_a_block_accepted_whole_settles_one_token_more() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    step = start(verifier)
    assert (step.start_index, step.token_ids, step.num_guessed) == (0, (10, 11, 12), 2)
    verdict = finish(verifier, step, [11, 12, 13])
    assert verdict.token_ids == (11, 12, 13)
    assert (verdict.start_index, verdict.num_accepted_tokens) == (1, 2)
    assert not verdict.is_rejection
    assert list(verifier.committed_ids) == [10, 11, 12, 13]


def test_the_targets_own_token_keeps_the_run_alive_if_the_draft_has_it_too() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    step = start(verifier)
    verifier.add_block(block(13, 14, start=3))
    verdict = finish(verifier, step, [11, 12, 13])
    assert not verdict.is_rejection
    assert start(verifier).token_ids == (13, 14)


def test_a_late_block_that_begins_with_a_settled_token_ends_the_conservative_mode() -> None:
    alone = StepLimits(0, 0, 1000)
    verifier = make_verifier(conservative=alone, optimistic=StepLimits(2, 2, 1000))
    verifier.add_block(block(77, 78))
    assert verify(verifier, 11, 0, 0).is_rejection
    assert not verify(verifier, 12).num_draft_tokens
    assert verifier.is_conservative
    verifier.add_block(block(12, 13, start=2, epoch=1))
    assert not verifier.is_conservative
    assert isinstance(verifier.next_step(0), Wait)


def test_each_wait_is_counted_from_the_end_of_the_step_before() -> None:
    verifier = make_verifier(optimistic=StepLimits(1, 8, 500))
    assert verifier.next_step(0) == Wait(500)
    verify(verifier, 11, now_ns=600)
    assert verifier.next_step(700) == Wait(1200)


def test_a_block_of_a_later_run_ends_the_queued_one() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    verifier.add_block(block(22, start=2, epoch=1))  # of the later run 1 is missing
    assert verifier.epoch == 1 and not verifier._run
    verifier.add_block(block(21, 22, epoch=1))
    assert start(verifier).token_ids == (10, 21, 22)


def test_a_draft_that_had_no_more_to_say_is_waited_for_again_once_its_run_is_wrong() -> None:
    verifier = make_verifier(optimistic=StepLimits(0, 8))
    verify(verifier, 11)
    verifier.add_block(block(77, 78, is_exhausted=True))
    assert verifier.epoch == 1
    assert verifier.next_step(0) == Wait(500)


def test_the_targets_own_token_ends_the_run_if_the_draft_has_another() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    step = start(verifier)
    verifier.add_block(block(77, 14, start=3))
    verdict = finish(verifier, step, [11, 12, 13])
    assert verdict.is_rejection
    assert (verdict.num_accepted_tokens, verdict.num_dropped_tokens, verdict.epoch) == (2, 2, 1)


def test_a_rejection_drops_what_is_queued_and_what_comes_of_that_run() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 55, 56))
    verdict = verify(verifier, 11, 12, 13, 14)
    assert verdict.token_ids == (11, 12)
    assert (verdict.is_rejection, verdict.epoch, verdict.num_dropped_tokens) == (True, 1, 2)
    verifier.add_block(block(57, 58, start=4))
    assert not verifier._run
    verifier.add_block(block(13, start=3, epoch=1))
    assert start(verifier).token_ids == (12, 13)


def test_a_late_block_that_differs_ends_the_run_when_it_arrives() -> None:
    verifier = make_verifier(optimistic=StepLimits(0, 8, 0))
    verify(verifier, 11)
    verifier.add_block(block(55, 12, 13))
    assert verifier.epoch == 1
    assert verifier.is_conservative
    # The rest of that run begins where a right block would, and is not taken for one.
    verifier.add_block(block(14, start=2))
    verifier.add_block(block(12, start=2, epoch=1))
    verdict = verify(verifier, 12, 13)
    assert (verdict.epoch, verdict.is_rejection, verdict.num_dropped_tokens) == (1, False, 4)


def test_a_block_after_a_gap_is_refused() -> None:
    verifier = make_verifier()
    verifier.add_block(block(12, 13, start=2))
    assert not verifier._run


def test_a_block_that_comes_twice_counts_once() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    verifier.add_block(block(11, 12))
    assert len(verifier._run) == 2


def test_the_tokens_of_a_draft_that_joined_replace_those_of_the_lost_one() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 55, 56))
    verifier.add_block(block(11, 12))
    assert start(verifier).token_ids == (10, 11, 12)


def test_an_end_token_inside_a_block_ends_the_sequence() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, END, 12))
    verdict = verify(verifier, 11, END, 50)
    assert verdict.token_ids == (11, END)
    assert verdict.finish_reason is FinishReason.STOP
    assert verifier.is_finished
    assert verifier.next_step(0) is None
    verifier.add_block(block(13, start=3))


def test_a_step_never_settles_more_than_is_left() -> None:
    verifier = make_verifier(max_tokens=3)
    verifier.add_block(block(11, 12, 13, 14))
    verdict = verify(verifier, 11, 12)
    assert verdict.num_draft_tokens == 1
    assert verdict.finish_reason is FinishReason.LENGTH
    assert list(verifier.committed_ids) == [10, 11, 12]


def test_the_wait_counts_from_when_the_device_was_free() -> None:
    verifier = make_verifier(optimistic=StepLimits(2, 8, 1000))
    assert verifier.next_step(5_000) == Wait(6_000)
    verifier.add_block(block(11))
    assert verifier.next_step(5_900) == Wait(6_000)
    assert start(verifier, 6_000).token_ids == (10, 11)


@pytest.mark.parametrize(
    "last", [block(11, is_exhausted=True), block(11, END), block(is_exhausted=True)]
)
def test_a_draft_that_has_no_more_is_not_waited_for(last: Block) -> None:
    verifier = make_verifier(optimistic=StepLimits(4, 8, 1000))
    verifier.add_block(last)
    assert isinstance(verifier.next_step(0), Step)


def test_an_exhausted_draft_is_waited_for_again_after_the_next_verdict() -> None:
    verifier = make_verifier(optimistic=StepLimits(1, 8, 1000))
    verifier.add_block(block(11, is_exhausted=True))
    verify(verifier, 11, 12)
    assert isinstance(verifier.next_step(0), Wait)


def test_the_last_token_is_not_waited_for() -> None:
    verifier = make_verifier(max_tokens=2, optimistic=StepLimits(4, 8, 1000))
    assert start(verifier).token_ids == (10,)


def test_a_pace_without_draft_tokens_is_target_only_and_ends_a_wait() -> None:
    verifier = make_verifier()
    assert isinstance(verifier.next_step(0), Wait)
    verifier.receive(Pace())
    assert start(verifier).token_ids == (10,)


def test_the_mode_follows_the_last_verified_block() -> None:
    verifier = make_verifier(optimistic=StepLimits(0, 8, 0), conservative=StepLimits(0, 1, 0))
    verifier.add_block(block(55))
    assert not verify(verifier, 11, 12).is_conservative
    verifier.add_block(block(12, 13, 14, start=2, epoch=1))
    verdict = verify(verifier, 12, 13)
    assert (verdict.is_conservative, verdict.num_draft_tokens) == (True, 1)
    assert start(verifier).token_ids == (13, 14)
    assert not verifier.is_conservative


def test_a_step_without_draft_tokens_changes_no_mode() -> None:
    verifier = make_verifier(optimistic=StepLimits(0, 8, 0), conservative=StepLimits(0, 2, 0))
    verifier.add_block(block(55))
    verify(verifier, 11, 12)
    verify(verifier, 12)
    assert verifier.is_conservative


def test_after_a_rejection_the_rest_of_the_broken_run_is_verified_without_a_wait() -> None:
    verifier = make_verifier(max_reused=3)
    verifier.add_block(block(10, 11, 50, 13, 14, 15, 16, start=0))
    assert verify(verifier, 11, 12, 13, 14, 15, 16, 17).is_rejection  # 50 should have been 12
    step = start(verifier)
    assert (step.start_index, step.token_ids) == (2, (12, 13, 14, 15))
    verdict = finish(verifier, step, (13, 14, 99, 16))
    assert verdict.token_ids == (13, 14, END)
    assert (verdict.num_reused_tokens, verdict.num_accepted_reused) == (3, 2)
    assert (verdict.num_draft_tokens, verdict.num_accepted_tokens) == (0, 0)
    assert not verdict.is_rejection


def test_the_next_run_is_compared_with_what_reuse_settled() -> None:
    verifier = make_verifier(max_reused=3)
    verifier.add_block(block(10, 11, 50, 13, 14, start=0))
    epoch = verify(verifier, 11, 12, 13, 14, 15).epoch
    step = start(verifier)
    verifier.add_block(block(13, 14, 15, 16, start=3, epoch=epoch))  # arrives during the forward
    assert not finish(verifier, step, (13, 14, 15)).is_rejection
    assert not verifier.is_conservative
    assert start(verifier).token_ids == (15, 16)


def test_tokens_of_the_next_run_are_preferred_to_reuse() -> None:
    verifier = make_verifier(max_reused=3)
    verifier.add_block(block(10, 11, 50, 13, 14, start=0))
    epoch = verify(verifier, 11, 12, 13, 14, 15).epoch
    verifier.add_block(block(20, start=3, epoch=epoch))
    assert start(verifier).token_ids == (12, 20)


def test_the_rest_of_a_run_that_comes_too_late_is_reused() -> None:
    verifier = make_verifier(max_reused=8, optimistic=StepLimits(0, 8, 0))
    verify(verifier, 11)
    verifier.add_block(block(50, 12, 13, start=1))
    assert start(verifier).token_ids == (11, 12, 13)


def a_verifier(*branches: Branch) -> Verifier:
    """A target that settled 10, and holds the run 11, 12, 13, 14 and branches of it."""
    verifier = make_verifier(conservative=StepLimits(1, 8, 1000), max_reused=4)
    verifier.add_block(Block(0, 1, (11, 12, 13, 14), branches=branches))
    return verifier


def test_the_target_verifies_the_branch_of_its_token_without_a_wait() -> None:
    verifier = a_verifier(Branch(1, (21, 31)), Branch(2, (22, 32, 33)))
    assert verify(verifier, 11, 22, 0, 0, 0).is_rejection
    step = start(verifier)
    verdict = finish(verifier, step, (32, 34, 0))
    assert (step.start_index, step.token_ids) == (2, (22, 32, 33))
    assert verdict.token_ids == (32, 34)
    assert (verdict.num_draft_tokens, verdict.num_accepted_tokens) == (2, 1)
    assert (verdict.num_reused_tokens, verdict.epoch) == (0, 1)


def test_a_branch_of_another_token_gives_way_to_the_broken_run() -> None:
    verifier = a_verifier(Branch(2, (22, 32, 33)))
    verify(verifier, 11, 23, 0, 0, 0)
    step = start(verifier)
    assert step.token_ids == (23, 13, 14)
    assert finish(verifier, step, (13, 14, 15)).num_accepted_reused == 2


def test_a_run_has_no_branches_of_the_run_before() -> None:
    verifier = a_verifier(Branch(2, (22, 32, 33)))
    verify(verifier, 21, 0, 0, 0, 0)
    verifier.add_block(Block(1, 2, (12, 13)))
    verify(verifier, 22, 0, 0)
    assert start(verifier).token_ids == (22, 13)  # the run's own rest


def test_the_next_run_is_preferred_to_a_branch_and_may_repeat_it() -> None:
    verifier = a_verifier(Branch(2, (22, 32, 33)))
    verify(verifier, 11, 22, 0, 0, 0)
    verifier.add_block(Block(1, 3, (32, 33, 34)))
    assert start(verifier).token_ids == (22, 32, 33, 34)


def test_a_branch_that_comes_with_a_late_block_is_used() -> None:
    verifier = make_verifier(optimistic=StepLimits(0, 8), conservative=StepLimits(1, 8, 9))
    verify(verifier, 21)
    verifier.add_block(Block(0, 1, (11, 12), branches=(Branch(1, (21, 31)),)))
    assert start(verifier).token_ids == (21, 31)
