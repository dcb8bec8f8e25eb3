"""What target-only decoding would take: the baseline that speedups are told against.

A *step* is the time from one verdict to the next in a stretch of target-only decoding, as the
gateway's clock sees it: the target's forward over one row, its sampling, and what its loop takes
between two forwards. Ordinary traffic has such stretches (requests with the policy `off`, answers
without a draft, pauses of the adaptive policy); a small share of requests is run target-only to
have them always. Steps grow with the context, so they are kept by context length.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass

CONTEXT_BOUNDS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MEMORY_STEPS = 500  # how far back a mean looks
_LEAST_TOKENS = 16  # a shorter answer teaches too little to be worth running it target-only


@dataclass(slots=True)
class OneRowTimes:
    """Target-only steps, added up."""

    num_steps: int = 0
    total_ns: int = 0
    total_context: int = 0

    def add(self, duration_ns: int, context_length: int) -> None:
        """Counts one step."""
        self.num_steps += 1
        self.total_ns += duration_ns
        self.total_context += context_length


StepsByContext = dict[int, OneRowTimes]
"""Sums by the index of their range of context lengths."""


def context_range(context_length: int) -> int:
    """The index of the range that a context of this length lies in."""
    return bisect_left(CONTEXT_BOUNDS, context_length)


@dataclass(slots=True)
class _Mean:
    weight: int = 0  # steps, as far as they are remembered
    step_ns: float = 0.0
    context: float = 0.0

    def add(self, sums: OneRowTimes) -> None:
        self.weight = min(self.weight + sums.num_steps, _MEMORY_STEPS)
        share = min(1.0, sums.num_steps / self.weight)
        self.step_ns += (sums.total_ns / sums.num_steps - self.step_ns) * share
        self.context += (sums.total_context / sums.num_steps - self.context) * share


class Baseline:
    """Step times by context length, learnt from target-only stretches."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self.learnt_ns = 0  # when something was learnt last

    @property
    def is_known(self) -> bool:
        """Whether anything was learnt yet."""
        return bool(self._means)

    def is_known_at(self, context_length: int) -> bool:
        """Whether steps were measured in the range of that context."""
        return context_range(context_length) in self._means

    def learn(self, steps: StepsByContext, now_ns: int) -> None:
        """Takes the target-only steps of one answer."""
        for index, sums in steps.items():
            self._means.setdefault(index, _Mean()).add(sums)
            self.learnt_ns = now_ns

    def step_ns(self, context_length: float) -> float:
        """Time of one token at that context; between and beyond what was measured, by the nearest
        measurements. Something must be known."""
        means = [self._means[index] for index in sorted(self._means)]
        assert means, "nothing was measured yet"
        for shorter, longer in itertools.pairwise(means):
            if shorter.context <= context_length <= longer.context:
                share = (context_length - shorter.context) / (longer.context - shorter.context)
                return shorter.step_ns + share * (longer.step_ns - shorter.step_ns)
        return (means[0] if context_length < means[0].context else means[-1]).step_ns

    def decode_ns(self, num_tokens: int, mean_context_length: float) -> float:
        """Time from the first to the last of ``num_tokens``, 0 for one or none."""
        return max(num_tokens - 1, 0) * self.step_ns(mean_context_length)

    def known_steps(self) -> list[tuple[str, float]]:
        """(upper bound of the range of context lengths, seconds of a step) of what is known."""
        bounds = [*map(str, CONTEXT_BOUNDS), "+Inf"]
        return [(bounds[i], self._means[i].step_ns / 1e9) for i in sorted(self._means)]


class Calibration:
    """Chooses the requests that are run target-only to keep the baseline fresh.

    ``share`` of those that may be chosen, evenly spread; besides the first of them, and one for
    each range of context lengths that answers turn out to lie in while nothing is known there.
    With a share of 0 none.
    """

    def __init__(self, share: float, baseline: Baseline) -> None:
        self._share = share
        self._baseline = baseline
        self._credit = 1.0  # for the first
        self._asked_for: set[int] = set()

    def is_due(self, max_tokens: int) -> bool:
        """Whether a request that may be chosen is; it is then counted as run."""
        if not self._share or max_tokens < _LEAST_TOKENS:
            return False
        if self._credit < 1 - 1e-9:
            self._credit += self._share
            return False
        self._credit -= 1 - self._share
        return True

    def note(self, context_length: int) -> None:
        """An answer was sped up at that context: its speedup should be known there."""
        index = context_range(context_length)
        if index not in self._asked_for and not self._baseline.is_known_at(context_length):
            self._asked_for.add(index)
            self._credit += 1
