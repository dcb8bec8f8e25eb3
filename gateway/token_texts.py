"""What single tokens stand for, and log-probabilities in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders

from hippo.types import TokenLogprobs

# JSON has no minus infinity: what a token gets that the model rules out, as at OpenAI and vLLM.
LEAST_LOGPROB = -9999.0


class TokenTexts:
    """The bytes of tokens, also of those that are only a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        is_of_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _bytes_of_characters() if is_of_bytes else None

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, or a stretch of it."""
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.id_to_token(token_id)
        if name is not None and self._byte_of is not None:
            return bytes(self._byte_of[character] for character in name)
        return str(self._tokenizer.decode([token_id])).encode()

    def describe(self, token_id: int, logprob: float) -> dict[str, Any]:
        """``token``, ``logprob`` and ``bytes``; bytes that form no character become U+FFFD."""
        data = self.bytes_of(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }

    def entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """One of ``choices[].logprobs.content``."""
        top = [self.describe(each, logprob) for each, logprob in logprobs.top]
        return {**self.describe(token_id, logprobs.logprob), "top_logprobs": top}


def _bytes_of_characters() -> dict[str, int]:
    """The byte for each character of a byte-level vocabulary (GPT-2's table): printable ones stand
    for themselves, the others for those from 256 on."""
    table = {}
    for byte in range(256):
        is_plain = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte
        if is_plain:
            table[chr(byte)] = byte
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
