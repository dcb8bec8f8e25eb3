"""Chooses the context length: how many tokens of one sequence, prompt and answer, have room."""

from __future__ import annotations

from collections.abc import Callable

VIDEO_CONTEXT = 32_768
"""Tokens for the longest video that Qwen2.5-VL's reference samples by default (24,576 visual
tokens), with a long text and answer; also the context of LLaVA-OneVision."""

SHARED_SLOTS = 4
"""Sequences that have room at once before one sequence may have more than VIDEO_CONTEXT tokens."""

LEAST_CONTEXT = 1024
"""Tokens; in a shorter context not even LLaVA-OneVision's 785 tokens of 4 frames have room."""

_STEP = 256  # tokens; a chosen context is a multiple, unless it is the checkpoint's limit


def choose_context(limit: int, num_slots: int | None, fits: Callable[[int, int], bool]) -> int:
    """Returns the context length that the memory allows, at most ``limit`` tokens; 0: none does.

    ``fits(context, num_slots)`` says whether so many slots of that many tokens have room beside the
    weights. With ``num_slots`` None, a context beyond VIDEO_CONTEXT must leave room for
    SHARED_SLOTS sequences, and a shorter one for a single sequence.
    """
    if num_slots is not None:
        return _longest(limit, lambda context: fits(context, num_slots))
    shared = _longest(limit, lambda context: fits(context, SHARED_SLOTS))
    alone = _longest(min(limit, VIDEO_CONTEXT), lambda context: fits(context, 1))
    return max(shared, alone)


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest context up to ``limit`` that fits, by bisection; 0 if none does."""
    if fits(limit):
        return limit
    fitting, exceeding = 0, -(-limit // _STEP)  # in steps
    while exceeding - fitting > 1:
        middle = (fitting + exceeding) // 2
        if fits(middle * _STEP):
            fitting = middle
        else:
            exceeding = middle
    return fitting * _STEP
