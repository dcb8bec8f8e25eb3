"""The token ids that a grammar allows, as masks of logits; by llguidance.

A mask depends only on the grammar and the token ids before it. So the masks of a forward's rows are
computed on a thread of their own while the forward runs, from the settled ids and the guess.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hippo.errors import HippoError, InvalidRequestError
from hippo.transfer import to_device
from hippo.types import ModelInfo, OpenRequest

_log = logging.getLogger(__name__)

GRAMMAR_PARAM = "sampling.grammar"
_MAX_COMPILED = 16  # grammars kept, because the requests of a client mostly share one
_SAMPLE = '{"a": 1}'
_NO_TOKEN = "no token of the model's vocabulary continues it"

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
"""A bit for each token id, whether it is allowed: bit ``id % 32`` of word ``id // 32``."""


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, and owns the thread that computes masks."""

    def __init__(self, info: ModelInfo) -> None:
        """Takes a second with 150,000 ids. Raises ValueError if llguidance cannot read the
        tokenizer, or encodes otherwise."""
        self._info = info
        self._tokenizer = LLTokenizer(
            info.tokenizer_json.decode(),
            n_vocab=info.num_token_ids,
            eos_token=list(info.end_token_ids) or None,
        )
        # Where only one text can follow, a mask is of the tokens that the text is encoded to.
        if self._tokenizer.decode_str(self._tokenizer.tokenize_str(_SAMPLE)) != _SAMPLE:
            raise ValueError(f"the tokenizer does not give {_SAMPLE} back")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._matcher = functools.lru_cache(_MAX_COMPILED)(self._new_matcher)

    def compile_request(self, request: OpenRequest) -> TokenMasks:
        """Returns the masks of a request with a grammar, the first one computed.

        Takes up to a few seconds for a large grammar; any thread but the one of masks. Raises
        InvalidRequestError for a grammar that is wrong or too large, and if no end token of the
        model ends the completion.
        """
        sampling = request.sampling
        if not set(request.end_token_ids) & set(self._info.end_token_ids):
            raise InvalidRequestError(
                "sampling.grammar needs an end token of the model among end_token_ids, which the "
                "completion has at the grammar's end",
                param=GRAMMAR_PARAM,
            )
        return TokenMasks(
            self._matcher(sampling.grammar),
            num_token_ids=self._info.num_token_ids,
            end_token_ids=request.end_token_ids,
            min_tokens=sampling.min_tokens,
            thread=self._thread,
        )

    def _new_matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if matcher.is_error():
            raise InvalidRequestError(
                f"sampling.grammar cannot be used: {one_line(matcher.get_error())}",
                param=GRAMMAR_PARAM,
            )
        return matcher

    def close(self) -> None:
        """Ends the thread after the masks in computation."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def grammar_compiler(info: ModelInfo) -> GrammarCompiler | None:
    """Returns the compiler of a model; None, with a warning in the log, if llguidance cannot read
    the model's tokenizer."""
    try:
        return GrammarCompiler(info)
    except ValueError as error:
        _log.warning("requests with a grammar are refused: %s", one_line(str(error)))
        return None


class TokenMasks:
    """The masks of one sequence. The state follows the ids that it is given, and is only a cache.

    The device thread calls ``start`` before a forward, ``take`` after it, and then ``check``.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        *,
        num_token_ids: int,
        end_token_ids: Collection[int],
        min_tokens: int,
        thread: ThreadPoolExecutor,
    ) -> None:
        """``compiled`` has consumed no ids and is not changed. Computes the mask of index 0; raises
        InvalidRequestError if there is none."""
        self._compiled = compiled
        self._thread = thread
        self._num_ids = num_token_ids
        self._end_ids = frozenset(end_token_ids)
        self._min_tokens = min_tokens
        is_end = np.zeros(-(-num_token_ids // 32) * 32, dtype=bool)
        is_end[list(self._end_ids)] = True
        self._ends: Words = np.packbits(is_end, bitorder="little").view(np.uint32)
        self._matcher = compiled.deep_copy()
        self._consumed: list[int] = []
        self._failure: tuple[int, str] | None = None  # the first row without a mask, and why
        self._masks: Future[torch.Tensor] | None = None
        self.start((), ())
        assert self._masks is not None
        self._masks.result()
        self.check((), ())

    def start(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> None:
        """Starts the masks of the rows after ``output_ids`` and after each of ``draft_ids``."""
        self._masks = self._thread.submit(self._compute, list(output_ids), tuple(draft_ids))

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
                f"the grammar cannot go on after {len(self._consumed)} tokens: {why}",
                param=GRAMMAR_PARAM,
            )

    def _compute(self, output_ids: list[int], draft_ids: tuple[int, ...]) -> torch.Tensor:
        self._follow(output_ids)
        rows = np.full((len(draft_ids) + 1, len(self._ends)), 0xFFFFFFFF, dtype=np.uint32)
        for row, words in enumerate(rows):
            self._failure = self._fill(words, row, len(output_ids) + row)
            if self._failure is not None or row == len(draft_ids):
                break
            draft_id = draft_ids[row]
            if draft_id in self._end_ids or not self._matcher.try_consume_tokens([draft_id]):
                break
            self._consumed.append(draft_id)
        octets = rows.view(np.uint8)
        flags = np.unpackbits(octets, axis=1, count=self._num_ids, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))

    def _follow(self, output_ids: list[int]) -> None:
        """Brings the matcher to ``output_ids``, by their difference to the consumed ids."""
        if self._failure is not None:  # a matcher never leaves an error
            self._matcher, self._consumed = self._compiled.deep_copy(), []
        num_common = len(self._consumed)
        if self._consumed != output_ids[:num_common]:
            pairs = enumerate(zip(self._consumed, output_ids, strict=False))
            num_common = next(
                (index for index, (one, other) in pairs if one != other),
                min(num_common, len(output_ids)),
            )
            self._matcher.rollback(len(self._consumed) - num_common)
            del self._consumed[num_common:]
        new_ids = output_ids[num_common:]
        if self._matcher.try_consume_tokens(new_ids) != len(new_ids):
            raise HippoError("the completion does not follow the request's grammar")
        self._consumed += new_ids

    def _fill(self, words: Words, row: int, index: int) -> tuple[int, str] | None:
        """Writes the mask of completion index ``index``; returns a failure."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            told = one_line(matcher.get_error())
            return row, _NO_TOKEN if told.startswith("NoExtension") else told
        if index < self._min_tokens:
            longer = words & ~self._ends
            if longer.any():  # a complete grammar ends the completion all the same
                words[:] = longer
        return None


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Returns ``logits`` ``[rows, num_ids]`` with minus infinity where ``allowed`` (bool, of the
    same shape, on the CPU) is false; does not change ``logits``."""
    return torch.where(to_device(allowed, logits.device), logits, -torch.inf)


def one_line(message: str) -> str:
    """Returns llguidance's message in one line of at most 400 letters, without the state and the
    backtrace that may follow it."""
    words = " ".join(message.partition("\n<")[0].split())
    return words if len(words) <= 400 else words[:397] + "..."
