"""Turns a request into a prompt (decode, pre-process, check), outside the device thread."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter_ns

from hippo.base.tasks import ClearingFrames, gather_or_cancel
from hippo.base.texts import TextLimit
from hippo.base.tracing import span
from hippo.engine.cpu import compute_alone, name_thread
from hippo.engine.grammars import GrammarCompiler
from hippo.engine.media_cache import Decoder, MediaCache
from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.models.interface.content import CachedRows, cached_rows, salted
from hippo.models.prompts.messages import REMEDY, texts_of
from hippo.sampling.masks import GRAMMAR_PARAM, TokenMasks
from hippo.types import FramePlan, MediaKind, OpenRequest

NUM_READER_THREADS = 2
"""Threads that pre-process media, and hence the number of sequences in the queue that read their
prompts: these threads can prepare no more at once."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt and the values computed with it."""

    prompt: Prompt
    rows: CachedRows  # the rows of the whole prompt
    max_tokens: int  # the request's limit of the completion, or the rest of the context
    preprocess_ns: int
    masks: TokenMasks | None = None  # the request's grammar


class PromptReader:
    """Reads prompts for one model; caches at most ``media_cache_bytes`` of decoded media, and takes
    at most ``max_decoded_bytes`` of them in one request. Without a ``compiler``, requests with a
    grammar are refused."""

    def __init__(
        self,
        model: VideoLanguageModel,
        decoder: Decoder,
        *,
        media_cache_bytes: int = 0,
        max_decoded_bytes: int,
        compiler: GrammarCompiler | None = None,
        text_limit: TextLimit | None = None,
    ) -> None:
        self._model = model
        self._compiler = compiler
        self._text_limit = text_limit
        self._max_decoded_bytes = max_decoded_bytes
        self.media_cache = MediaCache(decoder, media_cache_bytes)
        self._threads = ThreadPoolExecutor(
            NUM_READER_THREADS, thread_name_prefix="prepare", initializer=self._begin_thread
        )

    def _begin_thread(self) -> None:
        name_thread("prepare")
        if self._model.info.device == "cpu":
            compute_alone()

    async def read_prompt(self, request: OpenRequest) -> ReadPrompt:
        """Returns the request's prompt and the completion's limit (see ``fitting_max_tokens``).

        Raises MediaError with the item as ``param``, InvalidRequestError, or ContextLengthError if
        prompt and completion exceed the context.
        """
        began_ns = perf_counter_ns()
        if self._text_limit is not None:
            await self._text_limit.count_tokens(list(texts_of(request.messages)), self._threads)
        masks = None
        if request.sampling.grammar:
            if self._compiler is None:
                raise InvalidRequestError(
                    f"{self._model.info.name} takes no grammar, because llguidance cannot read its "
                    "tokenizer",
                    param=GRAMMAR_PARAM,
                )
            masks = await self._compiler.compile_request(request)
        plan, left_bytes = _plan_of_each(request), self._max_decoded_bytes

        async def decode(index: int) -> DecodedMedia:
            nonlocal left_bytes
            item = await self._decode(request, index, plan)
            left_bytes -= item.frames.nbytes
            if left_bytes < 0:
                raise MediaError(
                    "the videos and images of the request take more than the "
                    f"{self._max_decoded_bytes >> 20:,} MiB that this service allows for them when "
                    "decoded: send fewer or smaller ones, or lower max_pixels",
                    param="messages",
                )
            return item

        media = await gather_or_cancel(map(decode, range(len(request.media))))
        with span("prepare_prompt"):
            prompt, rows = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._prepare, request, media
            )
        if masks is not None and prompt.thought_end_id is not None:
            masks.begin_behind(prompt.thought_end_id)
        max_tokens = fitting_max_tokens(
            request, prompt.length, max_context_length=self._model.info.max_context_length
        )
        return ReadPrompt(prompt, rows, max_tokens, perf_counter_ns() - began_ns, masks)

    async def _decode(self, request: OpenRequest, index: int, plan: FramePlan) -> DecodedMedia:
        item = request.media[index]
        try:
            kind = {"hippo.media_kind": item.kind.value}
            with span("decode_media", attributes=kind), ClearingFrames():
                return await self.media_cache.decode(
                    item, plan, salt=request.cache_salt, client=request.client
                )
        except InvalidRequestError as error:
            if error.param is not None:
                raise
            # A new error, because other requests may wait for the same decoding.
            raise type(error)(error.message, param=f"media[{index}]") from None

    def _prepare(
        self, request: OpenRequest, media: Sequence[DecodedMedia]
    ) -> tuple[Prompt, CachedRows]:
        allows = request.allow_special_tokens
        prompt = self._model.prepare_prompt(
            request.messages,
            media,
            request.frame_plan,
            allow_special_tokens=allows,
            template_values=json.loads(request.template_values or "{}"),
        )
        prompt = salted(prompt, request.cache_salt)
        return prompt, cached_rows(prompt, request.cache_salt)

    def close(self) -> None:
        """Waits for prompts in preparation, and ends the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()


def _plan_of_each(request: OpenRequest) -> FramePlan:
    """Returns the plan of each item: the videos share ``max_visual_tokens`` equally."""
    plan = request.frame_plan
    num_videos = sum(item.kind is MediaKind.VIDEO for item in request.media)
    if not plan.max_visual_tokens or not num_videos:
        return plan
    return replace(plan, max_visual_tokens=max(plan.max_visual_tokens // num_videos, 1))


def fitting_max_tokens(
    request: OpenRequest, num_prompt_tokens: int, *, max_context_length: int
) -> int:
    """Returns the completion's limit after a prompt of ``num_prompt_tokens`` tokens.

    A default limit is reduced to the rest of the context. Raises ContextLengthError if a limit set
    by the client does not fit, or if the reduced limit allows no further token or fewer than
    ``min_tokens``.
    """
    num_left = max_context_length - num_prompt_tokens
    if request.max_tokens <= num_left:
        return request.max_tokens
    param, wanted = "max_tokens", request.max_tokens
    if request.is_max_tokens_default:
        if num_left <= len(request.committed_ids):
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for further ones "
                f"of an answer in the context of {max_context_length}; {REMEDY}",
                param="messages",
            )
        param, wanted = "min_tokens", request.sampling.min_tokens
        if wanted <= num_left:
            return num_left
    raise ContextLengthError(
        f"the prompt has {num_prompt_tokens} tokens and {param} is {wanted}: together "
        f"{num_prompt_tokens + wanted}, more than the context of {max_context_length}; lower "
        f"{param}, or {REMEDY}",
        param=param,
    )
