"""What the gateway's side relays and holds back."""

import dataclasses
from collections.abc import Sequence

import pytest

from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.coordinator import Coordinator, ToDraft, ToTarget
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import FixedPolicy, make_policy, serial_pace
from hippo.types import (
    TARGET_ONLY,
    Block,
    Branch,
    Commit,
    FinishReason,
    Pace,
    StepLimits,
    Timing,
    Verdict,
)

PACE = serial_pace(4)
PATIENT_PACES = [
    make_policy(name, gamma=4, max_draft_tokens=8).pace
    for name in ("serial", "vpsd", "optimistic", "conservative")
]


def waits_of(pace: Pace) -> set[int]:
    return {limits.wait_ns for limits in (pace.optimistic, pace.conservative)}


def test_a_block_of_an_older_epoch_goes_no_further() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_verdict(Verdict(1, 0, (1,), is_rejection=True, num_dropped_tokens=1), 0)
    assert coordinator.on_block(Block(0, 1, (2, 3)), 0) == []
    assert coordinator.stats.num_stale_blocks == 1
    assert coordinator.stats.num_dropped_tokens == 3


def test_nobody_is_told_of_a_pace_that_is_the_same_for_it() -> None:
    first = Pace(StepLimits(1, 8, 10), StepLimits(2, 8, 10), max_ahead=16, block_size=2)
    waits_longer = dataclasses.replace(first, optimistic=StepLimits(1, 8, 20))
    larger_blocks = dataclasses.replace(waits_longer, block_size=4)
    # A run's first block has as many tokens as the target waits for.
    larger_first = dataclasses.replace(larger_blocks, conservative=StepLimits(4, 8, 10))
    policy = FixedPolicy(first)
    coordinator = Coordinator(policy)
    coordinator.on_draft_ready()
    for index, (pace, expected) in enumerate(
        [
            (waits_longer, [ToTarget(waits_longer)]),
            (larger_blocks, [ToDraft(larger_blocks)]),
            (larger_first, [ToTarget(larger_first), ToDraft(larger_first)]),
            (TARGET_ONLY, [ToTarget(TARGET_ONLY), ToDraft(TARGET_ONLY)]),
        ]
    ):
        policy.pace = pace
        assert coordinator.on_block(Block(0, index, (1,)), 0)[1:] == expected


def test_a_draft_at_rest_hears_of_nothing_until_it_is_needed() -> None:
    policy = FixedPolicy(TARGET_ONLY)
    coordinator = Coordinator(policy)
    assert coordinator.on_draft_ready() == []
    assert coordinator.on_verdict(Verdict(0, 0, (1,)), 0) == []
    assert coordinator.on_verdict(Verdict(0, 1, (2,)), 0) == []
    policy.pace = PACE
    assert coordinator.on_verdict(Verdict(0, 2, (3,)), 0) == [
        ToDraft(Commit(0, 0, (1, 2, 3))),
        ToTarget(PACE),
        ToDraft(PACE),
    ]


def test_a_lost_draft_is_no_longer_waited_for() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    assert coordinator.on_draft_lost() == [ToTarget(TARGET_ONLY)]
    assert coordinator.on_draft_lost() == []
    assert coordinator.on_block(Block(0, 0, (1,)), 0) == []
    assert coordinator.stats.num_draft_losses == 1


def test_a_draft_that_joins_is_told_what_was_settled_since_it_was_opened() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_draft_lost()
    coordinator.on_verdict(Verdict(2, 0, (1,)), 0)
    num_known = len(coordinator.committed_ids)
    coordinator.on_verdict(Verdict(2, 1, (2, 3)), 0)
    commit, *paces = coordinator.on_draft_attached(num_known)
    assert commit == ToDraft(Commit(2, 1, (2, 3)))
    assert paces == [ToTarget(coordinator.pace), ToDraft(coordinator.pace)]
    assert coordinator.has_draft


@pytest.mark.parametrize("pace", PATIENT_PACES)
def test_the_target_waits_for_a_draft_only_when_its_prefill_is_over(pace: Pace) -> None:
    coordinator = Coordinator(FixedPolicy(pace))
    at_once, *others = dataclasses.astuple(coordinator.pace)
    assert at_once[:2] == dataclasses.astuple(pace.optimistic)[:2]
    assert waits_of(coordinator.pace) == {0}
    assert others[1:] == [*dataclasses.astuple(pace)[2:]]  # the draft's part is as it will be
    assert coordinator.on_verdict(Verdict(0, 0, (1,)), 0) == [ToDraft(Commit(0, 0, (1,)))]
    assert coordinator.on_draft_ready() == [ToTarget(pace)]
    assert coordinator.on_draft_ready() == []


@pytest.mark.parametrize("pace", PATIENT_PACES)
def test_nor_is_a_draft_waited_for_that_joins_before_it_drafts(pace: Pace) -> None:
    coordinator = Coordinator(FixedPolicy(pace))
    coordinator.on_draft_ready()
    coordinator.on_draft_lost()
    coordinator.on_verdict(Verdict(0, 0, (1,)), 0)
    for action in coordinator.on_draft_attached(1):
        assert isinstance(action.message, Pace)
        assert waits_of(action.message) == {0}
    assert coordinator.on_draft_ready() == [ToTarget(pace)]


class Listening(FixedPolicy):
    """Notes the outcomes that it is told of."""

    def __init__(self) -> None:
        super().__init__(PACE)
        self.outcomes: list[bool] = []

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        self.outcomes += outcomes

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        self.outcomes += outcomes


def test_the_policy_hears_of_each_draft_token_once_whichever_side_was_first() -> None:
    policy = Listening()
    coordinator = Coordinator(policy)
    coordinator.on_verdict(Verdict(0, 0, (1,)), 0)
    coordinator.on_block(Block(0, 0, (1, 2)), 0)  # the target was first
    assert policy.outcomes == [True]
    coordinator.on_verdict(Verdict(0, 1, (2, 3)), 0)
    assert policy.outcomes == [True, True]
    coordinator.on_block(Block(0, 2, (4, 5)), 0)  # the run breaks: what is behind says nothing
    coordinator.on_block(Block(0, 4, (3,)), 0)
    coordinator.on_verdict(Verdict(1, 3, (6, 3)), 0)
    assert policy.outcomes == [True, True, False]
    coordinator.on_block(Block(1, 3, (7, 3, 8)), 0)  # of the next run, at an index once more
    assert policy.outcomes == [True, True, False, False]


def test_nothing_is_sent_after_the_last_verdict() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    last = Verdict(0, 0, (1,), finish_reason=FinishReason.STOP)
    assert coordinator.on_verdict(last, 0) == []
    assert coordinator.is_finished
    assert coordinator.on_block(Block(0, 1, (2,)), 0) == []
    assert coordinator.on_draft_lost() == []
    assert coordinator.on_draft_attached() == []


def test_the_figures_keep_the_two_readings_apart() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_block(Block(0, 0, (1, 2, 3, 4), wait_ns=7), 0)
    for verdict in (
        Verdict(0, 0, (1,), timing=Timing(forward_ns=100)),
        Verdict(0, 1, (2, 3, 4), num_draft_tokens=2, num_accepted_tokens=2,
                timing=Timing(forward_ns=10, wait_ns=5)),
        Verdict(1, 4, (5, 6), num_draft_tokens=3, num_accepted_tokens=1, is_rejection=True,
                num_dropped_tokens=2, timing=Timing(forward_ns=20)),
        Verdict(1, 6, (7,), is_conservative=True, timing=Timing(20, 30)),
    ):  # fmt: skip
        coordinator.on_verdict(verdict, 0)
    stats = coordinator.stats
    assert stats.num_output_tokens == 7
    assert stats.num_forwards == 3
    assert stats.mean_tokens_per_forward == 1 + 3 / 3
    assert stats.mean_run_length == (6 + 1) / 2
    assert stats.acceptance_rate == 3 / 5
    assert stats.acceptance_per_position == [1.0, 0.5, 0.0]
    assert stats.num_mode_switches == 1
    assert (stats.prefill_ns, stats.forward_ns) == (100, 60)
    assert (stats.optimistic_ns, stats.conservative_ns, stats.target_only_ns) == (35, 0, 30)
    assert (stats.target_wait_ns, stats.draft_wait_ns) == (5, 7)


@pytest.mark.parametrize("is_rejected", [True, False])
def test_a_branch_is_taken_when_the_target_rejects_the_token_before_it(is_rejected: bool) -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_draft_ready()
    coordinator.on_verdict(Verdict(0, 0, (1,)), 0)
    coordinator.on_verdict(Verdict(0, 1, (2,)), 0)  # the target has not seen the block yet
    coordinator.on_block(Block(0, 1, (3, 4), branches=(Branch(1, (2, 5)),)), 0)
    end = None if is_rejected else FinishReason.STOP
    verdict = Verdict(int(is_rejected), 2, (5,), is_rejection=is_rejected, finish_reason=end)
    coordinator.on_verdict(verdict, 0)
    assert coordinator.stats.num_rejections == is_rejected
    assert coordinator.stats.num_branches_taken == is_rejected


def test_branches_count_as_drafted_once_and_tell_no_time_of_a_restart() -> None:
    times = PairTimes()
    policy = AdaptivePolicy(8, times)
    coordinator = Coordinator(policy)
    coordinator.on_draft_ready()
    coordinator.on_verdict(Verdict(0, 0, (10,)), 0)
    coordinator.on_block(Block(0, 1, (11, 12, 13), step_ns=1), 0)
    alone = Block(0, 4, (), is_exhausted=True, branches=(Branch(2, (22, 32, 33)),))
    assert coordinator.on_block(alone, 0) == [ToTarget(alone)]
    longer = dataclasses.replace(alone, branches=(Branch(2, (22, 32, 33, 34)),))
    coordinator.on_block(longer, 0)
    assert coordinator.stats.num_drafted_tokens == 3 + 3
    coordinator.on_verdict(Verdict(1, 1, (11, 22), is_rejection=True), 0)
    assert coordinator.stats.num_branches_taken == 1
    coordinator.on_block(Block(1, 3, (32, 33, 34, 35), is_from_branch=True), 500)
    assert coordinator.stats.num_drafted_tokens == 3 + 3 + 1
    assert times.restart.value == 0
    coordinator.on_verdict(Verdict(2, 3, (40,), is_rejection=True), 1000)
    coordinator.on_block(Block(2, 4, (41,), step_ns=1), 1500)
    assert times.restart.value == 500
    assert coordinator.stats.num_branches_taken == 1


def test_a_branch_that_the_gateway_never_saw_counts_in_full() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_draft_ready()
    coordinator.on_verdict(Verdict(0, 0, (10,)), 0)
    coordinator.on_block(Block(0, 1, (11, 12), branches=(Branch(1, (21, 31, 32)),)), 0)
    coordinator.on_verdict(Verdict(1, 1, (21,), is_rejection=True), 0)  # its run sends nothing
    coordinator.on_block(Block(1, 2, (33,)), 0)
    coordinator.on_verdict(Verdict(2, 2, (40,), is_rejection=True), 0)
    before = coordinator.stats.num_drafted_tokens
    coordinator.on_block(Block(2, 3, (41, 42), is_from_branch=True), 0)
    assert coordinator.stats.num_drafted_tokens == before + 2
    assert coordinator.stats.num_branches_taken == 1
