"""Compiles the grammars of requests, after a trial of what they cost."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llguidance import LLTokenizer

from hippo.base.worker_process import give_way_here
from hippo.errors import InvalidRequestError
from hippo.grammars.limits import new_matcher, one_line
from hippo.grammars.trials import GrammarTrials, tokenizer_options
from hippo.sampling.masks import GRAMMAR_PARAM, TokenMasks
from hippo.types import ModelInfo, OpenRequest

_log = logging.getLogger(__name__)

_SAMPLE = '{"a": 1}'


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, and owns the threads that compute masks.

    Each request has a matcher of its own: copies of one share its lexer, whose states would add up
    over all answers, and whose error would end them all.
    """

    def __init__(self, info: ModelInfo) -> None:
        """Takes a second with 150,000 ids. Raises ValueError if llguidance cannot read the
        tokenizer, or encodes otherwise."""
        self._info = info
        self._tokenizer = LLTokenizer(**tokenizer_options(info))
        # Where only one text can follow, a mask is of the tokens that the text is encoded to.
        if self._tokenizer.decode_str(self._tokenizer.tokenize_str(_SAMPLE)) != _SAMPLE:
            raise ValueError(f"the tokenizer does not give {_SAMPLE} back")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._slow_thread = ThreadPoolExecutor(
            1, thread_name_prefix="slow-masks", initializer=give_way_here
        )
        self._trials = GrammarTrials(info)

    async def compile_request(self, request: OpenRequest) -> TokenMasks:
        """Returns the masks of a request with a grammar, the first one computed.

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
        threads = await self._trials.check(sampling.grammar, GRAMMAR_PARAM)
        masks = partial(
            TokenMasks,
            partial(new_matcher, self._tokenizer, sampling.grammar),
            num_token_ids=self._info.num_token_ids,
            end_token_ids=request.end_token_ids,
            min_tokens=sampling.min_tokens,
            thread=self._thread,
            slow_thread=self._slow_thread,
        )
        return await asyncio.get_running_loop().run_in_executor(threads, masks)

    def close(self) -> None:
        """Ends the threads after the work in progress, and the process of trials."""
        self._trials.close()
        for thread in (self._thread, self._slow_thread):
            thread.shutdown(wait=True, cancel_futures=True)


def grammar_compiler(info: ModelInfo) -> GrammarCompiler | None:
    """Returns the compiler of a model; None, with a warning in the log, if llguidance cannot read
    the model's tokenizer."""
    try:
        return GrammarCompiler(info)
    except ValueError as error:
        _log.warning("requests with a grammar are refused: %s", one_line(str(error)))
        return None
