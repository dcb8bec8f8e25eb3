"""Compiles the grammars of requests, within the bounds of a trial, and keeps the compiled ones."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from hippo.engine.bounded import BoundedCache
from hippo.errors import InvalidRequestError
from hippo.grammars.limits import MAX_MEMORY_BYTES, new_matcher, one_line
from hippo.grammars.trials import GrammarTrials, Trial, tokenizer_options
from hippo.sampling.masks import GRAMMAR_PARAM, TokenMasks
from hippo.types import ModelInfo, OpenRequest

_log = logging.getLogger(__name__)

# The requests of a client mostly share a grammar. Two of the largest, or some fifty ordinary ones.
_CACHE_BYTES = 2 * MAX_MEMORY_BYTES
_LEAST_BYTES = 1 << 20  # least size in the sum: a trial measures by pages
_SAMPLE = '{"a": 1}'


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar, which has consumed no ids and is not changed."""

    matcher: LLMatcher
    trial: Trial


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, and owns the thread that computes masks."""

    def __init__(self, info: ModelInfo) -> None:
        """Takes a second with 150,000 ids. Raises ValueError if llguidance cannot read the
        tokenizer, or encodes otherwise."""
        self._info = info
        self._tokenizer = LLTokenizer(**tokenizer_options(info))
        # Where only one text can follow, a mask is of the tokens that the text is encoded to.
        if self._tokenizer.decode_str(self._tokenizer.tokenize_str(_SAMPLE)) != _SAMPLE:
            raise ValueError(f"the tokenizer does not give {_SAMPLE} back")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._trials = GrammarTrials(info)
        self._cache = BoundedCache[str, _Compiled](
            _CACHE_BYTES, size=lambda one: max(one.trial.num_bytes, _LEAST_BYTES)
        )

    async def compile_request(self, request: OpenRequest) -> TokenMasks:
        """Returns the masks of a request with a grammar, the first one computed; only for the event
        loop.

        Raises InvalidRequestError for a grammar that is wrong or too costly, and if no end token of
        the model ends the completion; OverloadedError and UnavailableError as ``GrammarTrials``.
        """
        sampling = request.sampling
        if not set(request.end_token_ids) & set(self._info.end_token_ids):
            raise InvalidRequestError(
                "sampling.grammar needs an end token of the model among end_token_ids, which the "
                "completion has at the grammar's end",
                param=GRAMMAR_PARAM,
            )
        loop = asyncio.get_running_loop()
        compiled = self._cache.get(sampling.grammar)
        if compiled is None:
            trial = await self._trials.check(sampling.grammar, GRAMMAR_PARAM)
            matcher = await loop.run_in_executor(
                trial.threads, new_matcher, self._tokenizer, sampling.grammar
            )
            compiled = _Compiled(matcher, trial)
            self._cache.put(sampling.grammar, compiled)

        def masks() -> TokenMasks:
            return TokenMasks(
                compiled.matcher,
                num_token_ids=self._info.num_token_ids,
                end_token_ids=request.end_token_ids,
                min_tokens=sampling.min_tokens,
                thread=self._thread,
            )

        return await loop.run_in_executor(compiled.trial.threads, masks)

    def close(self) -> None:
        """Ends the threads after the work in progress, and the process of trials."""
        self._trials.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def grammar_compiler(info: ModelInfo) -> GrammarCompiler | None:
    """Returns the compiler of a model; None, with a warning in the log, if llguidance cannot read
    the model's tokenizer."""
    try:
        return GrammarCompiler(info)
    except ValueError as error:
        _log.warning("requests with a grammar are refused: %s", one_line(str(error)))
        return None
