"""The estimated time of target-only decoding: the baseline of the reported speedups.

A *step* is the time from one verdict to the next during target-only decoding, measured with the
gateway's clock: the target's forward over one row, sampling, and the time of the engine's loop
between two forwards. Such steps occur in ordinary traffic (requests with the policy `off`, answers
without a draft, pauses of the adaptive policy); in addition, a small share of requests is run
target-only. Steps grow with the context, so they are averaged by context length.
"""

import itertools
from bisect import bisect_left
from dataclasses import dataclass

CONTEXT_BOUNDS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MEMORY_STEPS = 500  # most weight of a running mean, in steps: older steps fade
_LEAST_TOKENS = 16  # a lower max_tokens gives too few steps for calibration


@dataclass(slots=True)
class OneRowTimes:
    """Sums over target-only steps."""

    num_steps: int = 0
    total_ns: int = 0
    total_context: int = 0

    def add_step(self, duration_ns: int, context_length: int) -> None:
        self.num_steps += 1
        self.total_ns += duration_ns
        self.total_context += context_length


StepsByContext = dict[int, OneRowTimes]  # the key is a ``context_range``


def context_range(context_length: int) -> int:
    """Returns the index of the range of context lengths that holds ``context_length``."""
    return bisect_left(CONTEXT_BOUNDS, context_length)


@dataclass(slots=True)
class _Mean:
    weight: int = 0  # number of steps, at most _MEMORY_STEPS
    step_ns: float = 0.0
    context: float = 0.0


class Baseline:
    """Running means of target-only step times, by context length.

    To measure them, the first eligible request is run target-only, then an evenly spread ``share``,
    and one more for each range of context lengths that has answers but no measurements; with a
    share of 0, none.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._means: dict[int, _Mean] = {}  # by ``context_range``
        self.learnt_ns = 0  # time of the latest measurement
        self._share = share
        self._credit = 1.0  # the first request is chosen
        self._asked_for: set[int] = set()

    @property
    def is_known(self) -> bool:
        return bool(self._means)

    def learn_steps(self, steps: StepsByContext, now_ns: int) -> None:
        for index, sums in steps.items():
            mean = self._means.setdefault(index, _Mean())
            mean.weight = min(mean.weight + sums.num_steps, _MEMORY_STEPS)
            share = min(1.0, sums.num_steps / mean.weight)
            mean.step_ns += (sums.total_ns / sums.num_steps - mean.step_ns) * share
            mean.context += (sums.total_context / sums.num_steps - mean.context) * share
            self.learnt_ns = now_ns

    def step_ns(self, context_length: float) -> float:
        """Returns the time of one step: interpolated between the two nearest measured contexts, and
        the nearest measurement outside their range. ``is_known`` must be true."""
        means = [self._means[index] for index in sorted(self._means)]
        assert means, "nothing was measured yet"
        for shorter, longer in itertools.pairwise(means):
            if shorter.context <= context_length <= longer.context:
                share = (context_length - shorter.context) / (longer.context - shorter.context)
                return shorter.step_ns + share * (longer.step_ns - shorter.step_ns)
        return (means[0] if context_length < means[0].context else means[-1]).step_ns

    def known_steps(self) -> list[tuple[str, float]]:
        """Returns (upper bound of the context length, seconds per step) for each measured range."""
        bounds = [*map(str, CONTEXT_BOUNDS), "+Inf"]
        return [(bounds[i], self._means[i].step_ns / 1e9) for i in sorted(self._means)]

    def is_due(self, max_tokens: int) -> bool:
        """Returns whether to run a request target-only; call it once for each eligible request."""
        if not self._share or max_tokens < _LEAST_TOKENS:
            return False
        if self._credit < 1 - 1e-9:
            self._credit += self._share
            return False
        self._credit -= 1 - self._share
        return True

    def note_context_length(self, context_length: int) -> None:
        """Schedules a measurement if an answer had this context length and none exists there."""
        index = context_range(context_length)
        if index not in self._asked_for and index not in self._means:
            self._asked_for.add(index)
            self._credit += 1
