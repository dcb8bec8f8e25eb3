"""Jobs take turns by age and end with their sequence; which sequences of a draft may run their
vision tower before their selection has come."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from hippo.engine.jobs import Jobs
from hippo.engine.sequence import EngineSequence, Job
from hippo.engine.slots import SlotPool
from hippo.engine.stats import EngineCounters
from hippo.speculation.policies import vpsd_pace
from hippo.speculation.sharpness import SharpnessByTemperature
from services.draft.room import FeatureRoom
from services.draft.sequence import DraftSequence
from tests.support.running.services import toy_request


def sequence(client: str = "", **changes: Any) -> DraftSequence:
    return DraftSequence(
        toy_request(client=client, **changes),
        SlotPool(1, max_waiting=0),
        max_guessed=2,
        room=FeatureRoom(),
        sharpnesses=SharpnessByTemperature(),
    )


@pytest.mark.parametrize("without_guesses", [False, True])
def test_a_draft_guesses_unless_the_request_says_otherwise(without_guesses: bool) -> None:
    settled = (11, 12, 13, 14, 11, 12, 13)
    one = sequence(committed_ids=settled, pace=vpsd_pace(5), without_guesses=without_guesses)
    one.drafter.begin(14)
    step = one.drafter.next_step()
    assert step is not None
    assert step.guess == (() if without_guesses else (14, 11))


class Recorder:
    """Makes jobs that note their pieces, and how they end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def job(self, name: str, num_pieces: int = 0) -> Job:
        """A job of so many pieces before its end."""
        try:
            for number in range(num_pieces):
                self.events.append(f"{name}{number}")
                yield
            self.events.append(f"{name} over")
        except GeneratorExit:
            self.events.append(f"{name} closed")
            raise


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(EngineCounters())


def run(jobs: Jobs) -> None:
    while (one := jobs.next_sequence()) is not None:
        jobs.advance_job(one)


def test_the_oldest_runs_to_its_end_first(jobs: Jobs) -> None:
    recorder = Recorder()
    jobs.add_job(sequence(), recorder.job("a", 1))
    jobs.add_job(sequence(), recorder.job("b", 1))
    run(jobs)
    assert recorder.events == ["a0", "a over", "b0", "b over"]
    assert len(jobs) == 0


def _is_let_by(client: str, num_tokens: int, *, capacity: int = 100) -> bool:
    """Whether a prompt runs before the rest of one of 50 tokens of client "a" that has begun."""
    recorder, jobs = Recorder(), Jobs(EngineCounters(), capacity=capacity)
    long = sequence("a")
    jobs.add_job(long, recorder.job("long", 2), num_tokens=50)
    jobs.advance_job(long)
    jobs.add_job(sequence(client), recorder.job("other", 1), num_tokens=num_tokens)
    run(jobs)
    return recorder.events.index("other0") < recorder.events.index("long1")


def test_a_long_prompt_lets_short_ones_of_other_clients_by() -> None:
    assert _is_let_by("b", 25)
    assert not _is_let_by("b", 26)  # hardly shorter
    assert not _is_let_by("a", 5)  # its own
    assert _is_let_by("b", 25, capacity=75)
    assert not _is_let_by("b", 25, capacity=74)  # no memory


def test_clients_with_prompts_that_have_begun_take_turns() -> None:
    recorder, jobs = Recorder(), Jobs(EngineCounters(), capacity=100)
    long, short = sequence("a"), sequence("b")
    jobs.add_job(long, recorder.job("a", 3), num_tokens=50)
    jobs.advance_job(long)
    jobs.add_job(short, recorder.job("b", 2), num_tokens=10)
    for served_ns in ({"a": 1, "b": 1 << 60}, {"a": 1 << 60, "b": 1}) * 2:
        jobs._served_ns.update(served_ns)
        one = jobs.next_sequence()
        assert one is not None
        jobs.advance_job(one)
    assert recorder.events == ["a0", "a1", "b0", "a2", "b1"]
    jobs.drop_jobs(long)
    run(jobs)
    assert jobs._served_ns == {}


@pytest.mark.parametrize("capacity", [19, 20])
def test_a_paused_sequence_waits_and_only_its_memory_counts(capacity: int) -> None:
    recorder, paused = Recorder(), sequence()
    jobs = Jobs(EngineCounters(), capacity=capacity)
    jobs.add_job(paused, recorder.job("paused", 2), num_tokens=10)
    jobs.advance_job(paused)
    paused.is_paused = True
    assert (len(jobs), jobs.next_sequence()) == (0, None)
    other = sequence("b")
    jobs.add_job(other, recorder.job("other"), num_tokens=10)
    assert (len(jobs), jobs.next_sequence()) == (1, other if capacity == 20 else None)
    run(jobs)
    paused.is_paused = False
    run(jobs)
    is_first = recorder.events.index("other over") == 1
    assert is_first == (capacity == 20)


def test_a_failure_ends_the_job_and_is_raised(jobs: Jobs) -> None:
    def failing() -> Job:
        yield
        raise ValueError("broken")

    one = sequence()
    jobs.add_job(one, failing())
    jobs.advance_job(one)
    with pytest.raises(ValueError, match="broken"):
        jobs.advance_job(one)
    assert len(jobs) == 0


def test_dropped_jobs_are_closed(jobs: Jobs) -> None:
    recorder, one, other = Recorder(), sequence(), sequence()
    jobs.add_job(one, recorder.job("a", 1))
    jobs.add_job(other, recorder.job("b", 1))
    jobs.advance_job(one)
    jobs.drop_jobs(one)
    run(jobs)
    assert recorder.events == ["a0", "a closed", "b0", "b over"]


def test_a_job_that_drops_itself_is_closed_behind_its_piece(jobs: Jobs) -> None:
    events: list[str] = []

    def leaving() -> Job:
        one.is_closed = True
        jobs.drop_jobs(one)
        events.append("still runs")
        try:
            yield
        except GeneratorExit:
            events.append("closed")
            raise

    one = sequence()
    jobs.add_job(one, leaving())
    jobs.advance_job(one)
    assert events == ["still runs", "closed"]
    assert len(jobs) == 0


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
    jobs: Jobs = Jobs(counters, mark)
    seen_ns: list[int] = []

    def measuring() -> Job:
        for _ in recorder.job("a", 2):
            seen_ns.append(one.device_ns)
            yield

    jobs.add_job(one, measuring())
    run(jobs)
    assert events == ["a0", "a1", "0 done", "a over", "1 done"]
    assert 20_000_000 <= counters.prefill_ns == one.job_ns
    assert 0 <= seen_ns[0] <= seen_ns[1] <= one.job_ns
    before_ns = time.perf_counter_ns()
    assert jobs.wait_for_device() > before_ns
    assert jobs.wait_for_device() == 0
    assert events[5:] == ["2 done"], "once"
    assert counters.prefill_ns >= 30_000_000
    assert one.job_ns >= 30_000_000, "a piece that a forward waits for is its sequence's, too"


@pytest.mark.parametrize("ends_in_piece", [False, True])
def test_a_sequence_that_ended_is_held_by_nobody(ends_in_piece: bool) -> None:
    jobs: Jobs = Jobs(EngineCounters(), lambda: lambda: None)

    def end(one: EngineSequence) -> None:
        one.is_closed = True
        jobs.drop_jobs(one)

    def job(one: EngineSequence) -> Job:
        if ends_in_piece:
            end(one)
        yield

    one = sequence()
    jobs.add_job(one, job(one))
    jobs.advance_job(one)
    end(one)
    held = weakref.ref(one)
    del one
    assert held() is None
    assert jobs.wait_for_device() > 0, "the device is busy with its piece all the same"


def test_a_device_that_fails_leaves_no_job_behind() -> None:
    def mark() -> Callable[[], None]:
        raise RuntimeError("CUDA error")

    one = sequence()
    jobs: Jobs = Jobs(EngineCounters(), mark)
    jobs.add_job(one, Recorder().job("a"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        jobs.advance_job(one)
    assert not len(jobs) and jobs.wait_for_device() == 0


Enter = Callable[[str, int], None]


@pytest.fixture
def room() -> FeatureRoom:
    return FeatureRoom()


@pytest.fixture
def begun() -> list[str]:
    return []


@pytest.fixture
def enter(room: FeatureRoom, begun: list[str]) -> Enter:
    def enter(owner: str, num_tokens: int) -> None:
        room.enter(owner, num_tokens, lambda: begun.append(owner), capacity=100)

    return enter


def test_owners_enter_while_their_features_fit(enter: Enter, begun: list[str]) -> None:
    enter("a", 60)
    enter("b", 40)
    enter("text only", 0)
    enter("c", 1)
    assert begun == ["a", "b", "text only"]


def test_nobody_overtakes_one_who_waits(enter: Enter, begun: list[str], room: FeatureRoom) -> None:
    enter("a", 60)
    enter("long", 80)
    enter("short", 10)
    assert begun == ["a"]
    room.leave("a")
    assert begun == ["a", "long", "short"]


def test_who_has_a_selection_or_is_closed_waits_no_more(
    enter: Enter, begun: list[str], room: FeatureRoom
) -> None:
    enter("a", 100)
    for owner in ("selected", "closed", "last"):
        enter(owner, 50)
    assert room.skip_queue("selected")
    assert not room.skip_queue("selected")
    assert not room.skip_queue("a")  # its tower runs, and its features still count
    room.leave("closed")
    room.leave("unknown")
    assert begun == ["a"]
    room.leave("a")
    assert begun == ["a", "last"]
