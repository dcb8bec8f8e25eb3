"""What decoding an item costs, estimated before it begins; standard library only."""

from __future__ import annotations

_DECODED_PER_S = 2e9
_DRAWN_PER_S = 1e8
"""Pixels that one thread decodes, and turns into RGB and resizes, at most: about twice what one
thread of docs/performance.md's Xeon does, 1.2e9 (the film of an hour, most of whose frames no other
refers to and which are skipped) and 5e7. So what is refused does not fit on a faster core either.
"""

CHEAP_S = 1.0
"""Estimated seconds of a cheap item: any image up to the default --max-frame-pixels, and a clip of
10 s in 1080p, cost 0.4 and 0.7; a film costs 10 and more."""


class ExpensiveError(Exception):
    """The item costs more than the worker is for that was asked."""


def estimated_s(decoded_pixels: int, drawn_pixels: int) -> float:
    """Returns the seconds of one thread that an item takes at least."""
    return decoded_pixels / _DECODED_PER_S + drawn_pixels / _DRAWN_PER_S
