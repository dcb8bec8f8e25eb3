"""Jobs take turns by age, offer tails, and end with their sequence."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
import torch

from hippo.engine.jobs import MOST_TAIL_ROWS, Job, Jobs
from hippo.engine.sequence import EngineSequence
from hippo.engine.slots import SlotPool
from hippo.engine.stats import EngineCounters
from hippo.models.base import Prompt, PromptTail
from tests.support.services import toy_request


def sequence() -> EngineSequence:
    return EngineSequence(toy_request(), SlotPool(1, max_waiting=0).reserve())


def tail(num_rows: int) -> PromptTail:
    empty = torch.empty(0, dtype=torch.int64)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    return PromptTail(0, Prompt(ids, ids[None], num_rows, empty, (), empty, b""), 0)


class Recorder:
    """Makes jobs that note what they are sent, and how they end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def job(self, name: str, *pieces: PromptTail | None) -> Job:
        """One that has so many pieces, and what each yields."""
        try:
            for number, piece in enumerate(pieces):
                self.events.append(f"{name}{number}")
                logits = yield piece
                if logits is not None:
                    self.events.append(f"{name} joined")
            self.events.append(f"{name} over")
        except GeneratorExit:
            self.events.append(f"{name} closed")
            raise


@pytest.fixture
def jobs() -> Jobs[EngineSequence]:
    return Jobs(EngineCounters())


def run(jobs: Jobs[EngineSequence]) -> None:
    while (one := jobs.next()) is not None:
        jobs.advance(one)


def test_the_oldest_runs_to_its_end_first(jobs: Jobs[EngineSequence]) -> None:
    recorder = Recorder()
    jobs.add(sequence(), recorder.job("a", None))
    jobs.add(sequence(), recorder.job("b", None))
    run(jobs)
    assert recorder.events == ["a0", "a over", "b0", "b over"]
    assert len(jobs) == 0


def test_jobs_of_one_sequence_run_one_after_another(jobs: Jobs[EngineSequence]) -> None:
    recorder, one = Recorder(), sequence()
    jobs.add(one, recorder.job("a", None))
    jobs.add(one, recorder.job("b"))
    run(jobs)
    assert recorder.events == ["a0", "a over", "b over"]


def test_a_tail_waits_for_a_forward_and_is_withdrawn_without_one(
    jobs: Jobs[EngineSequence],
) -> None:
    recorder, first, second = Recorder(), sequence(), sequence()
    jobs.add(first, recorder.job("a", tail(5)))
    jobs.add(second, recorder.job("b", tail(6)))
    run(jobs)
    assert [offered.num_rows for _, offered in jobs.tails] == [5, 6]
    jobs.advance(first, torch.zeros(3))
    assert recorder.events == ["a0", "b0", "a joined", "a over"]
    jobs.withdraw_tails()
    assert not jobs.tails
    run(jobs)
    assert recorder.events[4:] == ["b over"]


def test_no_more_tails_are_offered_than_a_forward_takes(jobs: Jobs[EngineSequence]) -> None:
    recorder = Recorder()
    for name in "abc":
        jobs.add(sequence(), recorder.job(name, tail(MOST_TAIL_ROWS // 2)))
    run(jobs)
    assert recorder.events == ["a0", "b0"]


def test_a_failure_ends_the_job_and_is_raised(jobs: Jobs[EngineSequence]) -> None:
    def failing() -> Job:
        yield None
        raise ValueError("broken")

    one = sequence()
    jobs.add(one, failing())
    jobs.advance(one)
    with pytest.raises(ValueError, match="broken"):
        jobs.advance(one)
    assert len(jobs) == 0


def test_dropped_jobs_are_closed_and_their_tails_withdrawn(jobs: Jobs[EngineSequence]) -> None:
    recorder, one, other = Recorder(), sequence(), sequence()
    jobs.add(one, recorder.job("a", tail(5)))
    jobs.add(other, recorder.job("b", None))
    jobs.advance(one)
    jobs.drop(one)
    assert not jobs.tails
    run(jobs)
    assert recorder.events == ["a0", "a closed", "b0", "b over"]


def test_a_job_that_drops_itself_is_closed_behind_its_piece(jobs: Jobs[EngineSequence]) -> None:
    events: list[str] = []

    def leaving() -> Job:
        one.is_closed = True
        jobs.drop(one)
        events.append("still runs")
        try:
            yield tail(5)
        except GeneratorExit:
            events.append("closed")
            raise

    one = sequence()
    jobs.add(one, leaving())
    jobs.advance(one)
    assert events == ["still runs", "closed"]
    assert len(jobs) == 0
    assert not jobs.tails


def test_device_time_is_counted_for_sequence_and_service() -> None:
    counters = EngineCounters()
    jobs: Jobs[EngineSequence] = Jobs(counters)
    one, seen = sequence(), []

    def measuring() -> Job:
        seen.append(jobs.device_ns(one))
        yield None
        seen.append(jobs.device_ns(one))

    jobs.add(one, measuring())
    run(jobs)
    assert 0 <= seen[0] <= seen[1] <= one.job_ns == counters.prefill_ns


def test_at_most_one_piece_is_under_way_and_each_costs_what_the_device_takes() -> None:
    events: list[str] = []
    num_marked = 0

    def mark() -> Callable[[], None]:
        nonlocal num_marked
        number, num_marked = num_marked, num_marked + 1

        def wait() -> None:
            events.append(f"{number} done")
            time.sleep(0.01)

        return wait

    counters, recorder, one = EngineCounters(), Recorder(), sequence()
    recorder.events = events
    jobs: Jobs[EngineSequence] = Jobs(counters, mark)
    jobs.add(one, recorder.job("a", None, None))
    run(jobs)
    assert events == ["a0", "a1", "0 done", "a over", "1 done"]
    assert counters.prefill_ns >= 20_000_000
    assert one.job_ns >= 20_000_000
    before_ns = time.perf_counter_ns()
    assert jobs.settle() > before_ns
    assert jobs.settle() == 0
    assert events[5:] == ["2 done"], "once"
    assert counters.prefill_ns >= 30_000_000
    assert one.job_ns >= 30_000_000, "a piece that a forward waits for is its sequence's, too"


@pytest.mark.parametrize("ends_in_piece", [False, True])
def test_a_sequence_that_ended_is_held_by_nobody(ends_in_piece: bool) -> None:
    jobs: Jobs[EngineSequence] = Jobs(EngineCounters(), lambda: lambda: None)

    def end(one: EngineSequence) -> None:
        one.is_closed = True
        jobs.drop(one)

    def job(one: EngineSequence) -> Job:
        if ends_in_piece:
            end(one)
        yield None

    one = sequence()
    jobs.add(one, job(one))
    jobs.advance(one)
    end(one)
    held = weakref.ref(one)
    del one
    assert held() is None
    assert jobs.settle() > 0, "the device is busy with its piece all the same"


def test_a_device_that_fails_leaves_no_job_behind() -> None:
    def mark() -> Callable[[], None]:
        raise RuntimeError("CUDA error")

    one = sequence()
    jobs: Jobs[EngineSequence] = Jobs(EngineCounters(), mark)
    jobs.add(one, Recorder().job("a"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        jobs.advance(one)
    assert not len(jobs) and jobs.settle() == 0
