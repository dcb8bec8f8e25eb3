"""Chooses the context length, the tokens of one sequence with prompt and answer, the part of it
that videos may take, and how much of it a draft caches."""

from bisect import bisect_left
from collections.abc import Callable

from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO

VIDEO_CONTEXT = 32_768
"""Tokens; three quarters of them are the 24,576 visual tokens of the longest video that
Qwen2.5-VL's reference samples by default. Also the context of LLaVA-OneVision."""

SHARED_SLOTS = 4
"""Sequences that have room at once before one sequence may have more than VIDEO_CONTEXT tokens."""

LEAST_CONTEXT = 1024
"""Tokens; in a shorter context not even LLaVA-OneVision's 785 tokens of 4 frames have room."""

_TEMPLATE_TOKENS = 256  # more than the chat templates of the families have
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


def most_text_tokens(question: str) -> int:
    """Returns a number of tokens that a chat template with one question does not exceed: a token of
    the question has a byte or more."""
    return _TEMPLATE_TOKENS + len(question.encode())


def visual_limit(context: int, num_others: int, ceiling: int | None = None) -> int:
    """Returns how many visual tokens the videos of a request may have together, beside
    ``num_others`` tokens of text and answer in a context of ``context`` tokens.

    This is ``ceiling`` (None: three quarters of the context) while it has room: all turns of a
    conversation then have the same frames, which caches know. Otherwise it is the rest of the
    context in steps of at most a sixteenth, and at least 1.
    """
    most = context * 3 // 4 if ceiling is None else ceiling
    room = context - num_others
    if room >= most:
        return most
    return max(room - room % (1 << max(room.bit_length() - 5, 0)), 1)


def pruned_cache_tokens(context: int) -> int:
    """Returns how many tokens a slot of a draft caches by default, at most ``context``.

    These are all tokens of text and answer beside the longest video, and the visual tokens that are
    kept of the video, or all of a video that is not pruned.
    """
    most = visual_limit(context, 0)
    kept = max(most - int(PRUNING_RATIO * most), MIN_VISUAL_TOKENS)
    return min(context, context - most + kept)


def most_kept(cache_tokens: int, num_others: int, max_tokens: int) -> int:
    """Returns how many visual tokens of a prompt a slot of ``cache_tokens`` tokens has room for,
    beside ``num_others`` other tokens of the prompt.

    For the answer, of at most ``max_tokens`` tokens, at most a quarter of the slot is left: few
    answers are as long as they may be.
    """
    return max(cache_tokens - num_others - min(max_tokens, cache_tokens // 4), 0)


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest context up to ``limit`` that fits, by bisection; 0 if none does."""
    if fits(limit):
        return limit
    steps = range(1, -(-limit // _STEP))
    return _STEP * bisect_left(steps, True, key=lambda number: not fits(number * _STEP))
