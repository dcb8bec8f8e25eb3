"""Counters of an engine."""

from bisect import bisect_left
from dataclasses import dataclass, field

from hippo.metrics.services import FORWARD_SECONDS
from hippo.models.interface.base import PrefillHelp

_BUCKETS_NS = tuple(int(seconds * 1e9) for seconds in FORWARD_SECONDS)


@dataclass(slots=True)
class EngineCounters:
    """Only the device thread writes the counters; other threads may read slightly old values."""

    num_opened: int = 0
    num_failed: int = 0  # ended by an unexpected error
    num_prefills: int = 0
    num_prefix_hits: int = 0  # prefills that reused rows
    num_prompt_rows: int = 0  # rows of finished prefills, including reused rows
    num_reused_rows: int = 0
    num_helped: int = 0  # prefills of which a helper ran a part
    helped_rows: int = 0
    saved_ns: int = 0  # by the helper
    num_forwards: int = 0
    num_rows: int = 0
    num_stepped: int = 0  # sum of the sequences of each forward
    prefill_ns: int = 0
    forward_ns: int = 0
    idle_ns: int = 0
    forward_counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_NS) + 1))

    def count_prefill(
        self, num_rows: int, num_reused: int, help: PrefillHelp | None = None
    ) -> None:
        self.num_prefills += 1
        self.num_prefix_hits += num_reused > 0
        self.num_prompt_rows += num_rows
        self.num_reused_rows += num_reused
        if help is not None and help.num_rows:
            self.num_helped += 1
            self.helped_rows += help.num_rows
            self.saved_ns += max(help.saved_ns, 0)

    def count_forward(self, duration_ns: int, num_rows: int, num_sequences: int) -> None:
        self.num_forwards += 1
        self.num_rows += num_rows
        self.num_stepped += num_sequences
        self.forward_ns += duration_ns
        self.forward_counts[bisect_left(_BUCKETS_NS, duration_ns)] += 1
