"""The policies that set the pace, and the choice among them by name.

``off``           target-only decoding, the baseline.
``serial``        drafts gamma tokens, verifies them, drafts again (SpecVLM and most servers).
``vpsd``          HIPPO's method: blocks of gamma tokens, verified while the next block is drafted;
                  after a rejection the first draft token is verified as soon as it arrives.
``optimistic``    the target verifies all queued draft tokens, up to ``max_draft_tokens``.
``conservative``  the target verifies one draft token per forward.
``adaptive``      chooses by measured times and acceptance (:mod:`hippo.speculation.adaptive`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hippo.errors import InvalidRequestError
from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import PairTimes
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

POLICY_NAMES = ("adaptive", "serial", "vpsd", "optimistic", "conservative", "off")

# Default for one forward: with the settled token before them 32 rows, the most that forwards of
# fixed shape have.
MAX_DRAFT_TOKENS = 31

# Longer than any draft step, and the longest time that a stalled draft delays a forward.
_LONG_WAIT_NS = 1_000_000_000


class Policy(Protocol):
    """Sees every verdict and every block of one sequence, and may change the pace after each.

    ``outcomes`` says for each draft token that the event makes comparable with the target's token,
    in order, whether it is right. At most the last one is wrong, because the run ends there.
    """

    @property
    def pace(self) -> Pace:
        """The pace that both sides should follow now."""
        ...

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None: ...

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None: ...

    def observe_broken_run(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        """Takes whether tokens that a broken run had after its wrong token equal the target's at
        the same indices; ``is_start``: the first outcome is of the first such token."""


class FixedPolicy:
    """One pace for the whole sequence."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        pass

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        pass

    def observe_broken_run(self, outcomes: Sequence[bool], *, is_start: bool) -> None:
        pass


def serial_pace(gamma: int) -> Pace:
    """The target waits for gamma tokens; the draft waits for the verdict on them."""
    limits = StepLimits(gamma, gamma, _LONG_WAIT_NS)
    return Pace(optimistic=limits, conservative=limits, max_ahead=gamma, block_size=gamma)


def vpsd_pace(gamma: int) -> Pace:
    """The target verifies blocks of gamma, and one token after a rejection (HIPPO, arXiv
    2601.08273).

    The draft goes one token further than two blocks. After an accepted block, the target's own
    token stands for one draft token, so without the extra token every second block would be one
    token short when the target is free.
    """
    return Pace(
        optimistic=StepLimits(gamma, gamma, _LONG_WAIT_NS),
        conservative=StepLimits(1, 1, _LONG_WAIT_NS),
        max_ahead=2 * gamma + 1,
        block_size=gamma,
    )


def optimistic_pace(max_draft_tokens: int) -> Pace:
    """The target waits for one draft token and verifies all that are queued, up to the limit."""
    limits = StepLimits(1, max_draft_tokens, _LONG_WAIT_NS)
    return Pace(
        optimistic=limits, conservative=limits, max_ahead=2 * max_draft_tokens, block_size=1
    )


def conservative_pace(max_draft_tokens: int) -> Pace:
    """The target verifies one draft token per forward."""
    limits = StepLimits(1, 1, _LONG_WAIT_NS)
    return Pace(
        optimistic=limits, conservative=limits, max_ahead=2 * max_draft_tokens, block_size=1
    )


def make_policy(
    name: str, *, gamma: int, max_draft_tokens: int, times: PairTimes | None = None
) -> Policy:
    """Makes a policy for one sequence.

    ``gamma`` is the block size of ``serial`` and ``vpsd``, and ``max_draft_tokens`` bounds the
    draft tokens in one forward; both must be at least 1. The sequences of one pair of services
    share ``times``. Raises InvalidRequestError for an unknown name or a number out of range.
    """
    if gamma < 1:
        raise InvalidRequestError(f"gamma must be at least 1, not {gamma}", param="gamma")
    if max_draft_tokens < 1:
        raise InvalidRequestError(
            f"max_draft_tokens must be at least 1, not {max_draft_tokens}; "
            'for target-only decoding choose the policy "off"',
            param="max_draft_tokens",
        )
    makers: dict[str, Callable[[], Policy]] = {
        "adaptive": lambda: AdaptivePolicy(max_draft_tokens, times),
        "serial": lambda: FixedPolicy(serial_pace(min(gamma, max_draft_tokens))),
        "vpsd": lambda: FixedPolicy(vpsd_pace(min(gamma, max_draft_tokens))),
        "optimistic": lambda: FixedPolicy(optimistic_pace(max_draft_tokens)),
        "conservative": lambda: FixedPolicy(conservative_pace(max_draft_tokens)),
        "off": lambda: FixedPolicy(TARGET_ONLY),
    }
    if name not in makers:
        choices = ", ".join(POLICY_NAMES)
        message = f"unknown policy {name!r}; choose one of {choices}"
        raise InvalidRequestError(message, param="policy")
    return makers[name]()
