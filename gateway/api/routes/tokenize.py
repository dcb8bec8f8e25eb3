"""POST /tokenize and /detokenize: the served model's tokenizer, in vLLM's format."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from pydantic import ConfigDict, FailFast, Field, StrictBool

from gateway.api.media_schemas import Model
from gateway.api.responses import DetokenizeResponse, TokenizeResponse
from gateway.api.state import State
from gateway.door.middleware import LEFT
from hippo.errors import ContextLengthError, InvalidRequestError

router = APIRouter(tags=["tokens"])

_MOST_TOKENS = 1 << 16


class TokenizeRequest(Model):
    """A text to be tokenized."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "A red ball"}]})

    model: str | None = None
    """The served name; optional."""
    prompt: str
    """Plain text; a chat template is not applied."""
    add_special_tokens: StrictBool = True
    """Adds the tokenizer's default special tokens, if any."""
    return_token_strs: StrictBool = False
    """Adds `token_strs`."""


class DetokenizeRequest(Model):
    """Token ids to be decoded to text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [12, 7]}]})

    model: str | None = None
    """The served name; optional."""
    tokens: Annotated[tuple[int, ...], FailFast()] = Field(max_length=_MOST_TOKENS)


@contextlib.asynccontextmanager
async def ending_with(request: Request) -> AsyncIterator[None]:
    """Cancels the block when the client leaves."""
    work = asyncio.current_task()
    assert work is not None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if watching.done() and work.uncancel() == 0:
            raise HTTPException(LEFT, "the client left") from None
        raise
    finally:
        watching.cancel()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> TokenizeResponse:
    """Returns the token ids of a text."""
    info = state.backends.model(body.model)
    target = state.backends.pair(info.name).target
    async with ending_with(request):
        await target.text_limit.count_tokens([body.prompt], state.text_threads, param="prompt")
        (encoding,) = await asyncio.get_running_loop().run_in_executor(
            state.text_threads,
            # Among the methods that encode, this one lets other threads run meanwhile.
            lambda: target.tokenizer.encode_batch(
                [body.prompt], add_special_tokens=body.add_special_tokens
            ),
        )
    return TokenizeResponse(
        count=len(encoding.ids),
        max_model_len=info.max_context_length,
        tokens=encoding.ids,
        token_strs=encoding.tokens if body.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: State) -> DetokenizeResponse:
    """Returns the text of token ids, including special tokens."""
    info = state.backends.model(body.model)
    tokenizer = state.backends.pair(info.name).target.tokenizer
    if len(body.tokens) > info.max_context_length:
        raise ContextLengthError(
            f"tokens has {len(body.tokens):,} ids; the context holds {info.max_context_length:,}",
            param="tokens",
        )
    for token_id in body.tokens:
        if not 0 <= token_id < info.num_token_ids:
            raise InvalidRequestError(
                f"tokens names {token_id}; token ids are 0 to {info.num_token_ids - 1}",
                param="tokens",
            )
    text = await asyncio.get_running_loop().run_in_executor(
        state.text_threads,
        lambda: tokenizer.decode(list(body.tokens), skip_special_tokens=False),
    )
    return DetokenizeResponse(prompt=text)
