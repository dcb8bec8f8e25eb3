"""POST /tokenize and /detokenize: the served model's tokenizer, in vLLM's shape."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from gateway.openapi import answers
from gateway.responses import DetokenizeResponse, TokenizeResponse
from gateway.state import State
from hippo.errors import InvalidRequestError

router = APIRouter(tags=["tokens"])

_MOST_TOKENS = 1 << 20


class TokenizeRequest(BaseModel):
    """A text to be cut into tokens."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"prompt": "A red ball"}]}
    )

    model: str | None = Field(default=None, description="The served name, or nothing.")
    prompt: str = Field(description="Plain text; a chat template is not applied.")
    add_special_tokens: bool = Field(
        default=True, description="Adds those that the tokenizer adds of itself, if any."
    )
    return_token_strs: bool = Field(default=False, description="Adds `token_strs`.")


class DetokenizeRequest(BaseModel):
    """Token ids to be read as text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"tokens": [12, 7]}]}
    )

    model: str | None = Field(default=None, description="The served name, or nothing.")
    tokens: tuple[int, ...] = Field(max_length=_MOST_TOKENS)


@router.post("/tokenize", responses=answers(400, 404, 413, 503))
async def tokenize(body: TokenizeRequest, state: State) -> TokenizeResponse:
    """The token ids of a text."""
    pair = state.backends.pair(body.model)
    # Off the event loop: a long text takes a while.
    encoding = await asyncio.to_thread(
        pair.target.tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens
    )
    return TokenizeResponse(
        count=len(encoding.ids),
        max_model_len=pair.model.max_context_length,
        tokens=encoding.ids,
        token_strs=encoding.tokens if body.return_token_strs else None,
    )


@router.post("/detokenize", responses=answers(400, 404, 413, 503))
async def detokenize(body: DetokenizeRequest, state: State) -> DetokenizeResponse:
    """The text of token ids, special ones included."""
    pair = state.backends.pair(body.model)
    num_token_ids = pair.model.num_token_ids
    for token_id in body.tokens:
        if not 0 <= token_id < num_token_ids:
            raise InvalidRequestError(
                f"tokens names {token_id}; token ids are 0 to {num_token_ids - 1}",
                param="tokens",
            )
    decode = pair.target.tokenizer.decode
    text = await asyncio.to_thread(decode, list(body.tokens), skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
