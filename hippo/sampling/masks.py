"""The token ids that a grammar allows, as masks of logits; by llguidance.

A mask depends only on the grammar and the token ids before it. So the masks of a forward's rows are
computed on a thread of their own while the forward runs, from the settled ids and the guess. Masks
that would take longer than the forward are computed before it, on another thread: nobody else waits
for them.
"""

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter_ns

import numpy as np
import torch
from llguidance import LLMatcher

from hippo.errors import HippoError, InvalidRequestError
from hippo.grammars.limits import error_of
from hippo.models.interface.transfer import to_device

GRAMMAR_PARAM = "sampling.grammar"
_WRONG_ID = "the completion does not follow the request's grammar"

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
"""A bit for each token id, whether it is allowed: bit ``id % 32`` of word ``id // 32``."""


class TokenMasks:
    """The masks of one sequence. The state follows the ids that it is given, and is only a cache.

    The device thread calls ``start`` before a forward, ``take`` after it, and then ``check``. If
    ``expected_ns`` is too long, ``start`` gets an ``on_ready``, and the forward comes when
    ``are_ready``.
    """

    def __init__(
        self,
        new_matcher: Callable[[], LLMatcher],
        *,
        num_token_ids: int,
        end_token_ids: Collection[int],
        min_tokens: int,
        thread: ThreadPoolExecutor,
        slow_thread: ThreadPoolExecutor,
    ) -> None:
        """``new_matcher`` compiles the grammar, also after each failure in an unused row: a matcher
        never leaves an error, and its copies share the lexer, and so its error.

        Compiles it, and computes the mask of index 0, in the calling thread; raises
        InvalidRequestError if there is none."""
        self._new_matcher = new_matcher
        self._thread = thread
        self._slow_thread = slow_thread
        self._took_ns = 0  # time of the masks computed last
        self._num_ids = num_token_ids
        self._end_ids = frozenset(end_token_ids)
        self._min_tokens = min_tokens
        is_end = np.zeros(-(-num_token_ids // 32) * 32, dtype=bool)
        is_end[list(self._end_ids)] = True
        self._ends: Words = np.packbits(is_end, bitorder="little").view(np.uint32)
        self._begins_behind: int | None = None
        self._matcher = new_matcher()
        self._consumed: list[int] = []
        self._failure: tuple[int, str] | None = None  # the first row without a mask, and why
        self._masks: Future[torch.Tensor] | None
        self._compute_first()
        self.check((), ())

    def begin_behind(self, token_id: int) -> None:
        """The grammar begins behind the first ``token_id`` of the completion, the end of a thought,
        in which every token is allowed. Called before any other method."""
        self._begins_behind = token_id
        self._compute_first()

    def _compute_first(self) -> None:
        """Computes the mask of the prompt's row."""
        self._masks = Future()
        self._masks.set_result(self._compute([], ()))

    @property
    def expected_ns(self) -> float:
        """How long the next masks may take in ns: as the last ones, or, if the grammar must be
        compiled again, any time."""
        return math.inf if self._failure is not None else self._took_ns

    @property
    def are_started(self) -> bool:

        return self._masks is not None

    @property
    def are_ready(self) -> bool:

        return self._masks is not None and self._masks.done()

    def start(
        self,
        output_ids: Sequence[int],
        draft_ids: Sequence[int],
        *,
        on_ready: Callable[[], object] | None = None,
    ) -> None:
        """Starts the masks of the rows after ``output_ids`` and after each of ``draft_ids``. Masks
        that may take long have an ``on_ready``, which their thread calls at the end."""
        thread = self._thread if on_ready is None else self._slow_thread
        self._masks = thread.submit(self._compute, list(output_ids), tuple(draft_ids))
        if on_ready is not None:
            self._masks.add_done_callback(lambda _: on_ready())

    def take(self) -> torch.Tensor:
        """Waits for the masks: bool ``[rows, num_token_ids]``, true for allowed ids, on the CPU.

        Nothing is excluded in rows after a draft id that is not allowed, or that ends the
        completion; their tokens are never used.
        """
        assert self._masks is not None, "start is called first"
        masks, self._masks = self._masks, None
        return masks.result()

    def check(self, draft_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError if a used row of the rows taken last has no mask.

        ``token_ids`` are the tokens chosen for the rows; a row is used if the draft ids before it
        are equal to them.
        """
        if self._failure is None:
            return
        num_rows, why = self._failure
        if tuple(draft_ids[:num_rows]) == tuple(token_ids[:num_rows]):
            raise InvalidRequestError(
                f"{GRAMMAR_PARAM} cannot go on after {len(self._consumed)} tokens: {why}",
                param=GRAMMAR_PARAM,
            )

    def _compute(self, output_ids: list[int], draft_ids: tuple[int, ...]) -> torch.Tensor:
        began_ns = perf_counter_ns()
        rows = np.full((len(draft_ids) + 1, len(self._ends)), 0xFFFFFFFF, dtype=np.uint32)
        begin = self._begin_of_form([*output_ids, *draft_ids])
        row = min(max(begin - len(output_ids), 0), len(rows))  # the rows before are of a thought
        for index, words in enumerate(rows[:row], len(output_ids)):
            self._hold_ends(words, index)
        failure = self._follow(output_ids[begin:])
        while not failure and row < len(rows):
            failure = self._fill(rows[row], len(output_ids) + row)
            if failure or row == len(draft_ids):
                break
            draft_id = draft_ids[row]
            if draft_id in self._end_ids or not rows[row][draft_id // 32] >> draft_id % 32 & 1:
                break
            row += 1
            failure = self._consume([draft_id])
        self._failure = (row, failure) if failure else None
        octets = rows.view(np.uint8)
        flags = np.unpackbits(octets, axis=1, count=self._num_ids, bitorder="little")
        self._took_ns = perf_counter_ns() - began_ns
        return torch.from_numpy(flags.view(np.bool_))

    def _begin_of_form(self, token_ids: list[int]) -> int:
        """Returns the index of the first token of the form; behind all ids if none is there."""
        if self._begins_behind is None:
            return 0
        if self._begins_behind in token_ids:
            return token_ids.index(self._begins_behind) + 1
        return len(token_ids) + 1

    def _follow(self, output_ids: list[int]) -> str:
        """Brings the matcher to ``output_ids``, by their difference to the consumed ids; returns
        its failure, or an empty string."""
        if self._failure is not None:
            self._matcher, self._consumed = self._new_matcher(), []
        common = num_common(self._consumed, output_ids)
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        failure = self._consume(output_ids[common:])
        if failure == _WRONG_ID:
            raise HippoError(failure)
        return failure

    def _consume(self, token_ids: list[int]) -> str:
        """Consumes the ids, up to one that the matcher does not take; returns why it does not."""
        num_new = self._matcher.try_consume_tokens(token_ids)
        self._consumed += token_ids[:num_new]
        if num_new == len(token_ids):
            return ""
        self._matcher.compute_bitmask()  # which alone tells an error of the lexer
        return error_of(self._matcher) or _WRONG_ID

    def _fill(self, words: Words, index: int) -> str:
        """Writes the mask of completion index ``index``; returns a failure, or an empty string."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._hold_ends(words, index)
        return error_of(self._matcher)

    def _hold_ends(self, words: Words, index: int) -> None:
        """Excludes end tokens before ``min_tokens``."""
        if index < self._min_tokens:
            longer = words & ~self._ends
            if longer.any():  # a complete grammar ends the completion all the same
                words[:] = longer


def num_common(known: list[int], token_ids: Sequence[int]) -> int:
    """Returns how many leading ids are the same."""
    if known == list(token_ids[: len(known)]):
        return len(known)
    pairs = enumerate(zip(known, token_ids, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(known), len(token_ids)))


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Returns ``logits`` ``[rows, num_ids]`` with minus infinity where ``allowed`` (bool, of the
    same shape, on the CPU) is false; does not change ``logits``."""
    return torch.where(to_device(allowed, logits.device), logits, -torch.inf)
