"""What is done to the draft during a soak: killed and started again, stopped and continued."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hippo.cli.stack import Stack

_BETWEEN_S = (6.0, 16.0)  # from one trouble to the next
_GONE_S = (0.5, 4.0)  # how long a killed draft stays away
_STOPPED_S = (0.5, 6.0)
_KILLED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing done to the draft: when, in seconds from the beginning, and for how long."""

    kind: str  # "killed" or "stopped"
    at_s: float
    seconds: float  # until it was continued, or started and listening again


def trouble_draft(
    stack: Stack,
    stop: threading.Event,
    rng: random.Random,
    *,
    kills_until_s: float,
    on_trouble: Callable[[Trouble], None],
) -> None:
    """Goes on until ``stop``; after ``kills_until_s`` it only stops and continues."""
    draft, began_s = stack.child("draft"), time.monotonic()
    while not stop.wait(rng.uniform(*_BETWEEN_S)):
        at_s = time.monotonic() - began_s
        if at_s < kills_until_s and rng.random() < _KILLED_SHARE:
            draft.send_signal(signal.SIGKILL)
            draft.wait(5.0)
            stop.wait(rng.uniform(*_GONE_S))
            stack.start_service("draft")
            kind = "killed"
        else:
            draft.send_signal(signal.SIGSTOP)
            try:
                stop.wait(rng.uniform(*_STOPPED_S))
            finally:
                draft.send_signal(signal.SIGCONT)
            kind = "stopped"
        on_trouble(Trouble(kind, at_s, time.monotonic() - began_s - at_s))
