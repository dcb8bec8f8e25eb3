"""POST /tokenize and /detokenize: the served model's tokenizer, in vLLM's format."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import ConfigDict, Field, StrictBool

from gateway.media_schemas import Model
from gateway.openapi import answers
from gateway.responses import DetokenizeResponse, TokenizeResponse
from gateway.state import State
from hippo.errors import InvalidRequestError

router = APIRouter(tags=["tokens"])

_MOST_TOKENS = 1 << 20


class TokenizeRequest(Model):
    """A text to be tokenized."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "A red ball"}]})

    model: str | None = Field(default=None, description="The served name; optional.")
    prompt: str = Field(description="Plain text; a chat template is not applied.")
    add_special_tokens: StrictBool = Field(
        default=True, description="Adds the tokenizer's default special tokens, if any."
    )
    return_token_strs: StrictBool = Field(default=False, description="Adds `token_strs`.")


class DetokenizeRequest(Model):
    """Token ids to be decoded to text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [12, 7]}]})

    model: str | None = Field(default=None, description="The served name; optional.")
    tokens: tuple[int, ...] = Field(max_length=_MOST_TOKENS)


@router.post("/tokenize", responses=answers(400, 404, 408, 413, 503))
async def tokenize(body: TokenizeRequest, state: State) -> TokenizeResponse:
    """Returns the token ids of a text."""
    info = state.backends.model(body.model)
    tokenizer = state.backends.pair(info.name).target.tokenizer
    # Off the event loop: a long text takes a while.
    encoding = await asyncio.to_thread(
        tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens
    )
    return TokenizeResponse(
        count=len(encoding.ids),
        max_model_len=info.max_context_length,
        tokens=encoding.ids,
        token_strs=encoding.tokens if body.return_token_strs else None,
    )


@router.post("/detokenize", responses=answers(400, 404, 408, 413, 503))
async def detokenize(body: DetokenizeRequest, state: State) -> DetokenizeResponse:
    """Returns the text of token ids, including special tokens."""
    info = state.backends.model(body.model)
    tokenizer = state.backends.pair(info.name).target.tokenizer
    for token_id in body.tokens:
        if not 0 <= token_id < info.num_token_ids:
            raise InvalidRequestError(
                f"tokens names {token_id}; token ids are 0 to {info.num_token_ids - 1}",
                param="tokens",
            )
    text = await asyncio.to_thread(tokenizer.decode, list(body.tokens), skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
