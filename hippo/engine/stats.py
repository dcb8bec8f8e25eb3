"""What an engine counts while it runs; cheap enough for every forward."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

FORWARD_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
_BUCKETS_NS = tuple(int(seconds * 1e9) for seconds in FORWARD_BUCKETS_SECONDS)


@dataclass(slots=True)
class EngineCounters:
    """Written by the device thread alone; readers see whole numbers, if slightly old ones."""

    num_sequences: int = 0  # that the device thread knows of
    num_opened: int = 0
    num_failed: int = 0  # ended by an error of ours
    num_prefills: int = 0
    num_forwards: int = 0
    num_rows: int = 0
    prefill_ns: int = 0
    forward_ns: int = 0
    idle_ns: int = 0
    forward_counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_NS) + 1))

    def count_forward(self, duration_ns: int, num_rows: int) -> None:
        self.num_forwards += 1
        self.num_rows += num_rows
        self.forward_ns += duration_ns
        self.forward_counts[bisect_left(_BUCKETS_NS, duration_ns)] += 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where a service stands."""

    num_slots: int
    num_slots_used: int
    num_waiting: int  # for a slot
    num_streams: int
    counters: EngineCounters
