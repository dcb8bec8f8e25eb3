"""What the gateway's side relays and holds back."""

from __future__ import annotations

from hippo.speculation.coordinator import Coordinator, SendBlock, SendCommit, SetPace
from hippo.speculation.policies import FixedPolicy, serial_pace
from hippo.types import TARGET_ONLY, Block, Commit, FinishReason, Pace, Timing, Verdict

PACE = serial_pace(4)


class SteeredPolicy(FixedPolicy):
    """Its pace is set by the test."""

    def steer(self, pace: Pace) -> None:
        self._pace = pace


def test_blocks_go_to_the_target_and_verdicts_to_the_draft() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    block = Block(0, 0, (1, 2))
    assert coordinator.on_block(block, 0) == [SendBlock(block)]
    assert coordinator.on_verdict(Verdict(0, 0, (1,)), 0) == [SendCommit(Commit(0, 0, (1,)))]
    assert list(coordinator.committed_ids) == [1]


def test_a_block_of_an_older_epoch_goes_no_further() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_verdict(Verdict(1, 0, (1,), is_rejection=True, num_dropped_tokens=1), 0)
    assert coordinator.on_block(Block(0, 1, (2, 3)), 0) == []
    assert coordinator.stats.num_stale_blocks == 1
    assert coordinator.stats.num_dropped_tokens == 3


def test_a_changed_pace_is_told_once_to_both() -> None:
    policy = SteeredPolicy(PACE)
    coordinator = Coordinator(policy)
    policy.steer(serial_pace(2))
    assert coordinator.on_block(Block(0, 0, (1,)), 0)[-1] == SetPace(serial_pace(2))
    assert coordinator.pace == serial_pace(2)
    assert len(coordinator.on_block(Block(0, 1, (1,)), 0)) == 1


def test_a_draft_at_rest_hears_of_nothing_until_it_is_needed() -> None:
    policy = SteeredPolicy(TARGET_ONLY)
    coordinator = Coordinator(policy)
    assert coordinator.on_verdict(Verdict(0, 0, (1,)), 0) == []
    assert coordinator.on_verdict(Verdict(0, 1, (2,)), 0) == []
    policy.steer(PACE)
    assert coordinator.on_verdict(Verdict(0, 2, (3,)), 0) == [
        SendCommit(Commit(0, 0, (1, 2, 3))),
        SetPace(PACE),
    ]


def test_without_a_draft_the_target_goes_alone() -> None:
    coordinator = Coordinator(FixedPolicy(PACE), has_draft=False)
    assert coordinator.pace == TARGET_ONLY
    assert coordinator.on_verdict(Verdict(0, 0, (1,)), 0) == []


def test_a_lost_draft_is_no_longer_waited_for() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    assert coordinator.on_draft_lost() == [SetPace(TARGET_ONLY)]
    assert coordinator.on_draft_lost() == []
    assert coordinator.on_block(Block(0, 0, (1,)), 0) == []
    assert coordinator.stats.num_draft_losses == 1


def test_a_draft_that_joins_is_told_what_was_settled_since_it_was_opened() -> None:
    coordinator = Coordinator(FixedPolicy(PACE))
    coordinator.on_draft_lost()
    coordinator.on_verdict(Verdict(2, 0, (1,)), 0)
    num_known = len(coordinator.committed_ids)
    coordinator.on_verdict(Verdict(2, 1, (2, 3)), 0)
    assert coordinator.on_draft_attached(num_known) == [
        SendCommit(Commit(2, 1, (2, 3))),
        SetPace(PACE),
    ]
    assert coordinator.has_draft


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
    coordinator.on_verdict(Verdict(0, 0, (1,), timing=Timing(forward_ns=100)), 0)
    coordinator.on_verdict(
        Verdict(
            0, 1, (2, 3, 4), num_draft_tokens=2, num_accepted_tokens=2,
            timing=Timing(forward_ns=10, wait_ns=5),
        ),
        0,
    )  # fmt: skip
    coordinator.on_verdict(
        Verdict(
            1, 4, (5, 6), num_draft_tokens=3, num_accepted_tokens=1, is_rejection=True,
            num_dropped_tokens=2, timing=Timing(forward_ns=20),
        ),
        0,
    )  # fmt: skip
    coordinator.on_verdict(Verdict(1, 6, (7,), is_conservative=True, timing=Timing(20, 30)), 0)
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


def test_figures_of_nothing_are_zero() -> None:
    stats = Coordinator(FixedPolicy(PACE)).stats
    assert stats.acceptance_rate == 0
    assert stats.mean_tokens_per_forward == 0
    assert stats.mean_run_length == 0
    assert stats.acceptance_per_position == []
