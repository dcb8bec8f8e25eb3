"""POST /tokenize and /detokenize: the served model's tokenizer, in vLLM's format."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from pydantic import FailFast, Field, StrictBool
from tokenizers import Encoding

from gateway.api.media_schemas import Int, Model, field_error
from gateway.api.responses import DetokenizeResponse, TokenizeResponse
from gateway.api.state import State
from gateway.door.middleware import LEFT
from hippo.base.tasks import cancel_all
from hippo.errors import ContextLengthError

router = APIRouter(tags=["tokens"])

_MOST_TOKENS = 1 << 16


class TokenizeRequest(Model):
    """A text to be tokenized."""

    model: str | None = None
    """The served name; optional."""
    prompt: str = Field(examples=["A red ball"])
    """Plain text; a chat template is not applied."""
    add_special_tokens: StrictBool = True
    """Adds the tokenizer's default special tokens, if any."""
    return_token_strs: StrictBool = False
    """Adds `token_strs`."""


class DetokenizeRequest(Model):
    """Token ids to be decoded to text."""

    model: str | None = None
    """The served name; optional."""
    tokens: Annotated[tuple[Int, ...], FailFast()] = Field(
        max_length=_MOST_TOKENS, examples=[[12, 7]]
    )


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> TokenizeResponse:
    """Returns the token ids of a text."""
    info = state.backends.model(body.model)
    target = state.backends.pair(info.name).target

    async def encode() -> Encoding:
        await target.text_limit.count_tokens([body.prompt], state.text_threads, param="prompt")
        (encoding,) = await asyncio.get_running_loop().run_in_executor(
            state.text_threads,
            # Among the methods that encode, this one lets other threads run meanwhile.
            lambda: target.tokenizer.encode_batch(
                [body.prompt], add_special_tokens=body.add_special_tokens
            ),
        )
        return encoding

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, leaving = asyncio.create_task(encode()), asyncio.create_task(leave())
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise HTTPException(LEFT, "the client left")
        encoding = work.result()
    finally:
        await cancel_all((work, leaving))
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
            why = f"names {token_id}; token ids are 0 to {info.num_token_ids - 1}"
            raise field_error("tokens", why)
    text = await asyncio.get_running_loop().run_in_executor(
        state.text_threads,
        lambda: tokenizer.decode(list(body.tokens), skip_special_tokens=False),
    )
    return DetokenizeResponse(prompt=text)
