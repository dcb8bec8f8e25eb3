"""Two devices beside each other in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import pytest

from hippo.speculation.virtual_time import Device


class Clock:
    """Runs events in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_ns: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_ns, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


def pair(clock: Clock, *, contention: float) -> tuple[Device, Device, list[tuple[str, float]]]:
    a, b = Device(clock), Device(clock)
    a.stand_beside(b, contention)
    b.stand_beside(a, 0.0)
    return a, b, []


def test_only_the_part_of_a_run_that_overlaps_is_slower() -> None:
    clock = Clock()
    a, b, ends = pair(clock, contention=0.5)
    a.run(100.0, lambda: ends.append(("a", clock.now)))
    clock.at(10.0, partial(b.run, 30.0, lambda: ends.append(("b", clock.now))))
    clock.run()
    # 10 alone, 30 beside that do the work of 20, and the other 70 alone.
    assert ends == [("b", 40.0), ("a", pytest.approx(110.0))]


def test_a_run_that_begins_beside_another_is_slower_until_that_ends() -> None:
    clock = Clock()
    a, b, ends = pair(clock, contention=0.5)
    b.run(30.0, lambda: ends.append(("b", clock.now)))
    a.run(100.0, lambda: ends.append(("a", clock.now)))
    clock.run()
    assert ends == [("b", 30.0), ("a", pytest.approx(110.0))]


def test_a_fixed_run_and_one_whose_neighbour_left_keep_their_time() -> None:
    clock = Clock()
    a, b, ends = pair(clock, contention=0.5)
    b.run(30.0, lambda: None)
    a.run(100.0, lambda: ends.append(("a", clock.now)), is_fixed=True)
    clock.run()
    assert [name for name, _ in ends] == ["a"]
    assert ends[0][1] == 100.0
    a, b, ends = pair(clock, contention=0.5)
    began = clock.now
    b.run(80.0, lambda: None)
    a.run(100.0, lambda: ends.append(("a", clock.now - began)))
    clock.at(began + 30.0, partial(b.stand_beside, None, 0.0))
    clock.run()
    assert ends[0][1] == pytest.approx(110.0)


def test_a_device_gets_cold_with_its_rest() -> None:
    clock = Clock()
    device = Device(clock)
    found = []
    device.run(100.0, lambda: found.append(device.coldness))
    for later_ms in (3.2, 8.0, 20.0):
        clock.at(100.0 + later_ms * 1e6, lambda: found.append(device.coldness))
    clock.run()
    assert found == [0.0, pytest.approx(0.2), pytest.approx(0.5), 1.0]
