"""The policies that set the pace, and the choice among them by name.

``off``           target-only decoding, the baseline.
``serial``        drafts gamma tokens, verifies them, drafts again (SpecVLM and most servers).
``vpsd``          HIPPO's method, which has PEARL's schedule: gamma tokens are drafted while the
                  target verifies those before them; after a rejection it decodes one token at once,
                  and compares that with the draft's first.
``optimistic``    the target verifies all queued draft tokens, up to ``max_draft_tokens``.
``conservative``  the target verifies one draft token per forward.
``adaptive``      chooses by measured times and acceptance (:mod:`hippo.speculation.adaptive`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.drafter import FIRST_BLOCK
from hippo.speculation.estimates import PairTimes
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

POLICY_NAMES = ("adaptive", "serial", "vpsd", "optimistic", "conservative", "off")

# Default for one forward: with the settled token before them 32 rows, the most that forwards of
# fixed shape have.
MAX_DRAFT_TOKENS = 31

Gamma = int | Literal["auto"]
"""The draft length of ``serial`` and ``vpsd``; "auto": the measured T_target / T_draft."""

DEFAULT_GAMMA = 5

# Longer than any draft step, and the longest time that a stalled draft delays a forward.
_LONG_WAIT_NS = 1_000_000_000

# An automatic gamma changes only if the ratio is further from it: it rounds at 0.5, and a ratio
# between two whole numbers would otherwise cost messages with every measurement.
_FAR = 0.75


class FixedPolicy:
    """One pace for the whole sequence, whatever it sees.

    A policy sees every verdict and every block of one sequence, and may change the pace that both
    sides follow after each. ``outcomes`` says for each draft token that the event makes comparable
    with the target's token, in order, whether it is right. At most the last one is wrong, because
    the run ends there.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None: ...

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None: ...

    def observe_broken_run(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        """Takes whether tokens that a broken run had after its wrong token equal the target's at
        the same indices; ``is_start``: the first outcome is of the first such token."""


Policy = FixedPolicy | AdaptivePolicy


class AutoGammaPolicy(FixedPolicy):
    """The pace of the published rule gamma = T_target / T_draft (ParallelVLM; nano-PEARL, which
    rounds it), at most ``max_gamma``, by the times measured in the last forwards.

    T_target is the time of a forward with one row for each of its sequences. It is extrapolated: if
    nearly all forwards have equally many rows, as with a draft that is never rejected, a row is
    taken to cost 2 % of a forward, and gamma is up to a quarter too small. Until both times are
    known, gamma is the default.
    """

    def __init__(
        self, pace_of: Callable[[int], Pace], *, max_gamma: int, times: PairTimes | None
    ) -> None:
        # On a shared device the draft slows these forwards down, which other policies must not
        # take for the target's own time.
        self._times = PairTimes() if times is None or times.takes_turns else times
        self._pace_of = pace_of
        self._max_gamma = max_gamma
        self._gamma = min(DEFAULT_GAMMA, max_gamma)
        super().__init__(pace_of(self._gamma))
        self._review_gamma()

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        if verdict.start_index > 0 and verdict.timing.forward_ns:  # not the prefill
            self._times.observe_forward(verdict.timing)
            self._review_gamma()

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        if block.step_ns:
            self._times.draft_step.observe_time(block.step_ns)
            self._review_gamma()

    def _review_gamma(self) -> None:
        if not self._times.is_known:
            return
        ratio = self._times.one_row_ns / self._times.draft_step.value
        if abs(ratio - self._gamma) > _FAR:
            self._gamma = min(max(round(ratio), 1), self._max_gamma)
            self.pace = self._pace_of(self._gamma)


def serial_pace(gamma: int) -> Pace:
    """The target waits for gamma tokens; the draft waits for the verdict on them."""
    limits = StepLimits(gamma, gamma, _LONG_WAIT_NS)
    return Pace(optimistic=limits, conservative=limits, max_ahead=gamma, block_size=gamma)


def vpsd_pace(gamma: int) -> Pace:
    """The schedule of PEARL (arXiv 2408.11850), which HIPPO (arXiv 2601.08273) uses.

    A forward verifies the gamma - 1 tokens queued before (at least one), while the draft drafts
    gamma; after a rejection it runs at once without draft tokens.
    """
    num = max(gamma - 1, 1)
    limits = StepLimits(num, num, _LONG_WAIT_NS)
    # The target never waits for tokens behind those that it verifies: a block ends where a forward
    # begins, and the last block before it is not more than half of the tokens.
    sizes = (size for size in range(1, FIRST_BLOCK + 1) if gamma % size == 0)
    size = max(size for size in sizes if size == 1 or 2 * size <= gamma)
    return Pace(
        optimistic=limits,
        conservative=StepLimits(),  # without draft tokens
        max_ahead=gamma + num,
        block_size=size,
    )


def _patient_policy(most: int, max_draft_tokens: int) -> Policy:
    """The target waits for one draft token and verifies those that are queued, up to ``most``."""
    limits = StepLimits(1, most, _LONG_WAIT_NS)
    return FixedPolicy(Pace(limits, limits, max_ahead=2 * max_draft_tokens, block_size=1))


def make_policy(
    name: str, *, gamma: Gamma, max_draft_tokens: int, times: PairTimes | None = None
) -> Policy:
    """Makes a policy for one sequence.

    ``gamma`` is the draft length of ``serial`` and ``vpsd``, and ``max_draft_tokens`` bounds the
    draft tokens in one forward; numbers are at least 1. The sequences of one pair of services
    share ``times``.
    """

    def with_gamma(pace_of: Callable[[int], Pace]) -> Policy:
        if gamma == "auto":
            return AutoGammaPolicy(pace_of, max_gamma=max_draft_tokens, times=times)
        return FixedPolicy(pace_of(min(gamma, max_draft_tokens)))

    makers: Mapping[str, Callable[[], Policy]] = {
        "adaptive": lambda: AdaptivePolicy(max_draft_tokens, times),
        "serial": lambda: with_gamma(serial_pace),
        "vpsd": lambda: with_gamma(vpsd_pace),
        "optimistic": lambda: _patient_policy(max_draft_tokens, max_draft_tokens),
        "conservative": lambda: _patient_policy(1, max_draft_tokens),
        "off": lambda: FixedPolicy(TARGET_ONLY),
    }
    return makers[name]()
