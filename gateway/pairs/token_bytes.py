"""The bytes that each token stands for, from which text is put together."""

import re

from tokenizers import Tokenizer

from hippo.base.thoughts import thought_ids

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of a vocabulary's tokens: UTF-8, where a token may hold a part of a character.

    A text is the bytes of its tokens, one after the other. This holds where a token's text depends
    on nothing but whether the token is the first: for vocabularies of bytes (GPT-2's), of
    SentencePiece, with or without tokens of single bytes, and of words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._known = {
            each: token.content.encode() for each, token in added.items() if token.special
        }
        self.special_ids = frozenset(self._known)
        self.thought_ids = thought_ids(added)  # of the markers; None: the model has none
        decoder = tokenizer.decoder
        is_of_bytes = decoder is not None and decoder.decode(["\u0120"]) == " "
        self._byte_of = _bytes_of_characters() if is_of_bytes else None
        self._has_byte_tokens = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    def of_token(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Returns the bytes of a token; a special token has the bytes of its name. Some
        vocabularies leave out the space of a token that is the first of a text."""
        if is_first and self._byte_of is None:
            return self._of_text(token_id, self._decode(token_id))
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._find(token_id)
        return data

    def _find(self, token_id: int) -> bytes:
        if self._byte_of is None:
            behind_itself = self._decode(token_id, token_id)[len(self._decode(token_id)) :]
            return self._of_text(token_id, behind_itself)
        name = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([self._byte_of[character] for character in name])
        except KeyError:  # as in tokenizers, such a name is text
            return name.encode()

    def _of_text(self, token_id: int, text: str) -> bytes:
        """Returns the bytes of a token that is decoded to ``text``: to U+FFFD if it is a byte that
        is no character."""
        name = self._tokenizer.id_to_token(token_id) or ""
        byte = _BYTE_NAME.fullmatch(name) if self._has_byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte and text else text.encode()

    def _decode(self, *token_ids: int) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (GPT-2's table): printable
    bytes have their own character, the others have the characters from 256 on."""
    plain = (*range(33, 127), *range(161, 173), *range(174, 256))
    others = (byte for byte in range(256) if byte not in plain)
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
