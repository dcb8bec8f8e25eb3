"""Who decides the pace: fixed policies and the choice by name.

``off``           target-only decoding: the baseline.
``serial``        draft gamma tokens, verify them, draft again (SpecVLM and most servers).
``vpsd``          the paper's form: blocks of gamma, verified while the next one is drafted; after
                  a rejection the first draft token is verified as soon as it is there.
``optimistic``    the target always takes all that is queued.
``conservative``  the target always takes one.
``adaptive``      chooses from measured times and acceptance (:mod:`hippo.speculation.adaptive`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hippo.errors import InvalidRequestError
from hippo.speculation.adaptive import AdaptivePolicy
from hippo.speculation.estimates import PairTimes
from hippo.types import TARGET_ONLY, Block, Pace, StepLimits, Verdict

POLICY_NAMES = ("adaptive", "serial", "vpsd", "optimistic", "conservative", "off")

# In one forward by default: with the settled token before them 32 rows, as many as steps of fixed
# shape take.
MAX_DRAFT_TOKENS = 31

# Longer than any step; a stalled draft holds a step up no longer than this, until it is given up.
_LONG_WAIT_NS = 1_000_000_000


class Policy(Protocol):
    """Sees every verdict and every block of one sequence; its pace may change with either.

    ``outcomes`` are those of the draft tokens that the event allows to compare with the target's,
    in order: is each right? At most the last is wrong, for the run ends there.
    """

    @property
    def pace(self) -> Pace:
        """The pace that both sides should go at now."""
        ...

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None: ...

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None: ...


class FixedPolicy:
    """One pace for the whole sequence."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        pass

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        pass


def serial_pace(gamma: int) -> Pace:
    """The target waits for gamma tokens; the draft waits for the verdict on them."""
    limits = StepLimits(gamma, gamma, _LONG_WAIT_NS)
    return Pace(optimistic=limits, conservative=limits, max_ahead=gamma, block_size=gamma)


def vpsd_pace(gamma: int) -> Pace:
    """Post-verify in blocks of gamma, pre-verify one by one (method.md, section 3).

    The draft goes one token further than two blocks: of an accepted block the target's own token
    uses one up, and without it every second block would be one short when the target is free.
    """
    return Pace(
        optimistic=StepLimits(gamma, gamma, _LONG_WAIT_NS),
        conservative=StepLimits(1, 1, _LONG_WAIT_NS),
        max_ahead=2 * gamma + 1,
        block_size=gamma,
    )


def optimistic_pace(max_draft_tokens: int) -> Pace:
    """The target takes all that is queued, at least one."""
    limits = StepLimits(1, max_draft_tokens, _LONG_WAIT_NS)
    return Pace(
        optimistic=limits, conservative=limits, max_ahead=2 * max_draft_tokens, block_size=1
    )


def conservative_pace(max_draft_tokens: int) -> Pace:
    """The target takes one draft token at a time."""
    limits = StepLimits(1, 1, _LONG_WAIT_NS)
    return Pace(
        optimistic=limits, conservative=limits, max_ahead=2 * max_draft_tokens, block_size=1
    )


def make_policy(
    name: str, *, gamma: int, max_draft_tokens: int, times: PairTimes | None = None
) -> Policy:
    """A policy for one sequence.

    ``gamma`` is the block of ``serial`` and ``vpsd``, ``max_draft_tokens`` the most that the
    others may put into one forward; both at least 1. ``times`` is shared by the sequences of one
    pair of services. Raises InvalidRequestError for an unknown
    name or a number out of range.
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
