"""What the target's side settles, queues, waits for and drops."""

from collections.abc import Sequence
from typing import Any

import pytest

from hippo.speculation.core import Step, Wait
from hippo.speculation.verifier import Verifier
from hippo.types import Block, Branch, Pace, StepLimits, Timing, Verdict

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


def test_the_targets_own_token_keeps_the_run_alive_if_the_draft_has_it_too() -> None:
    verifier = make_verifier()
    verifier.add_block(block(11, 12))
    step = start(verifier)
    verifier.add_block(block(13, 14, start=3))
    verdict = finish(verifier, step, [11, 12, 13])
    assert not verdict.is_rejection
    assert start(verifier).token_ids == (13, 14)


def test_the_wait_counts_from_when_the_device_was_free() -> None:
    verifier = make_verifier(optimistic=StepLimits(2, 8, 1000))
    assert verifier.next_step(5_000) == Wait(6_000)
    verifier.add_block(block(11))
    assert verifier.next_step(5_900) == Wait(6_000)
    step = start(verifier, 6_000)
    assert step.token_ids == (10, 11)
    finish(verifier, step, (12, 13))
    assert verifier.next_step(6_500) == Wait(7_000)  # of a run that broke


def test_the_next_run_is_compared_with_what_reuse_settled() -> None:
    verifier = make_verifier(max_reused=3)
    verifier.add_block(block(10, 11, 50, 13, 14, start=0))
    epoch = verify(verifier, 11, 12, 13, 14, 15).epoch
    step = start(verifier)
    verifier.add_block(block(13, 14, 15, 16, start=3, epoch=epoch))  # arrives during the forward
    assert not finish(verifier, step, (13, 14, 15)).is_rejection
    assert not verifier.is_conservative
    assert start(verifier).token_ids == (15, 16)


PATIENT = {"optimistic": StepLimits(4, 8, 1000)}
AT_ONCE = {"optimistic": StepLimits(0, 8, 0)}
REUSES = {"max_reused": 4, "conservative": StepLimits(1, 8, 1000)}
WRONG = block(10, 11, 50, 13, 14, start=0)
RUN = Block(0, 1, (11, 12, 13, 14), branches=(Branch(2, (22, 32, 33)),))
LATE = Block(0, 1, (11, 12), branches=(Branch(1, (21, 31)),))
NOTHING_MORE = block(is_exhausted=True)
NO_WAIT = {"optimistic": StepLimits(0, 8, 0), "conservative": StepLimits(0, 1, 0)}


@pytest.mark.parametrize(
    ("options", "events", "expected"),
    [
        pytest.param(
            {},
            [block(11, 55, 56), (11, 12, 13, 14),
             {"token_ids": (11, 12), "is_rejection": True, "epoch": 1, "num_dropped_tokens": 2},
             block(57, 58, start=4), block(13, start=3, epoch=1)],
            (12, 13),
            id="a rejection drops what is queued and what comes of that run",
        ),
        pytest.param(
            AT_ONCE,
            # The rest of that run begins where a right block would, and is not taken for one.
            [(11,), block(55, 12, 13), block(14, start=2), block(12, start=2, epoch=1), (12, 13),
             {"epoch": 1, "is_rejection": False, "num_dropped_tokens": 4, "is_conservative": True}],
            (13,),
            id="a late block that differs ends the run when it arrives",
        ),
        pytest.param(
            NO_WAIT,
            [block(55), (11, 12), {"is_conservative": False}, block(12, 13, 14, start=2, epoch=1),
             (12, 13), {"is_conservative": True, "num_draft_tokens": 1}, (14, 15),
             {"is_conservative": False}],
            (15,),
            id="the mode follows the last verified block",
        ),
        pytest.param(
            NO_WAIT,
            [block(55), (11, 12), (12,), (13,), {"is_conservative": True}],
            (13,),
            id="a step without draft tokens changes no mode",
        ),
        pytest.param(
            {"max_reused": 3},
            [block(10, 11, 50, 13, 14, 15, 16, start=0), (11, 12, 13, 14, 15, 16, 17),
             {"is_rejection": True}, (13, 14, 20, 16),
             {"start_index": 3, "token_ids": (13, 14, 20), "num_reused_tokens": 3,
              "num_accepted_reused": 2, "num_draft_tokens": 0, "num_accepted_tokens": 0,
              "is_rejection": False}],
            None,
            id="after a rejection the rest of the broken run is verified without a wait",
        ),
        pytest.param(
            REUSES,
            [Block(0, 1, (11, 12, 13, 14), branches=(Branch(1, (21, 31)), Branch(2, (22, 32, 33)))),
             (11, 22, 0, 0, 0), {"is_rejection": True}, (32, 34, 0),
             {"start_index": 3, "token_ids": (32, 34), "num_draft_tokens": 2,
              "num_accepted_tokens": 1, "num_reused_tokens": 0, "epoch": 1}],
            None,
            id="the target verifies the branch of its token without a wait",
        ),
        pytest.param(
            REUSES,
            [RUN, (11, 23, 0, 0, 0), (13, 14, 15), {"num_accepted_reused": 2}],
            None,
            id="a branch of another token gives way to the broken run",
        ),
        pytest.param(PATIENT, [block(11, is_exhausted=True)], (10, 11), id="exhausted"),
        pytest.param(PATIENT, [block(11, END)], (10, 11, END), id="the draft's end"),
        pytest.param(PATIENT, [NOTHING_MORE], (10,), id="exhausted before a token"),
        pytest.param(PATIENT, [NOTHING_MORE, (11,)], None, id="exhausted before a verdict"),
        pytest.param(AT_ONCE, [(11,), block(7, is_exhausted=True)], None, id="exhausted and wrong"),
        pytest.param({"max_tokens": 2, **PATIENT}, [], (10,), id="the last token"),
        pytest.param(PATIENT, [Pace()], (10,), id="target-only"),
        pytest.param(
            {"optimistic": StepLimits(2, 2, 1000), "conservative": StepLimits(0, 0, 1000)},
            [block(77, 78), (11, 0, 0), (12,), block(12, 13, start=2, epoch=1)],
            None,
            id="a late block that begins with a settled token ends the conservative mode",
        ),
        pytest.param(
            {},
            [block(11, 12), block(22, start=2, epoch=1), block(21, 22, epoch=1)],
            (10, 21, 22),
            id="a block of a later run, whose first one is missing, ends the queued run",
        ),
        pytest.param(
            REUSES,
            [WRONG, (11, 12, 13, 14, 15), block(20, start=3, epoch=1)],
            (12, 20),
            id="the next run is preferred to reuse",
        ),
        pytest.param(
            REUSES | AT_ONCE, [(11,), block(50, 12, 13)], (11, 12, 13), id="a late run is reused"
        ),
        pytest.param(
            REUSES,
            [RUN, (21, 0, 0, 0, 0), Block(1, 2, (12, 13)), (22, 0, 0)],
            (22, 13),
            id="a run has no branches of the run before",
        ),
        pytest.param(
            REUSES,
            [RUN, (11, 22, 0, 0, 0), Block(1, 3, (32, 33, 34))],
            (22, 32, 33, 34),
            id="the next run is preferred to a branch",
        ),
        pytest.param(REUSES | AT_ONCE, [(21,), LATE], (21, 31), id="the branch of a late block"),
    ],
)  # fmt: skip
def test_verdicts_and_the_next_step(
    options: dict[str, Any], events: list[Any], expected: tuple[int, ...] | None
) -> None:
    """The events are messages, the target's tokens of a step, and what its verdict tells; the ids
    of the step behind them are expected, or a wait (None)."""
    verifier = make_verifier(**options)
    for event in events:
        if isinstance(event, tuple):
            verdict = verify(verifier, *event, now_ns=2000)
        elif isinstance(event, dict):
            assert {name: getattr(verdict, name) for name in event} == event
        else:
            verifier.receive(event)
    step = verifier.next_step(0)
    assert (step.token_ids if isinstance(step, Step) else None) == expected
    assert isinstance(step, Wait) == (expected is None)
