"""Bounds texts before they are tokenized whole: by their length, then by counting in pieces."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from hippo.errors import ContextLengthError
from hippo.types import ModelInfo

_log = logging.getLogger(__name__)

_PIECE_LENGTH = 1 << 14  # characters: a piece takes a thread some 10 ms
_CUT_TOKENS = 8  # a cut adds fewer tokens: it splits one word at most


class TextLimit:
    """The texts that fit into a context of ``max_tokens`` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Looks at each token of the vocabulary."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # A token of n characters, or of a byte-level tokenizer of n bytes, is n characters of text.
        self.max_length = max_tokens * max(map(len, tokenizer.get_vocab()))
        # Services encode the name of a control token as other text, of no more tokens than bytes.
        self._most = {
            each: len(token.content.encode())
            for each, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    async def count_tokens(
        self, texts: Sequence[str], threads: ThreadPoolExecutor, *, param: str = "messages"
    ) -> int:
        """Returns an upper bound of the number of tokens of all texts: up to 7 too many for each
        16,384 characters, and for the name of a control token as many as it has bytes.

        Each piece is a task of its own for ``threads``, so that others come between, and no piece
        is tokenized once the caller is cancelled. Raises ContextLengthError, about the field
        ``param``, at the first token beyond the context.
        """
        length = sum(map(len, texts))
        if length > self.max_length:
            raise ContextLengthError(
                f"the text has {length:,} characters; the context of {self._max_tokens} tokens "
                f"holds {self.max_length:,} at most: shorten it",
                param=param,
            )
        run = asyncio.get_running_loop().run_in_executor
        least = most = 0
        for text in texts:
            for number, piece in enumerate(_pieces(text)):
                ids = await run(threads, self._encode, piece)
                least += len(ids) - _CUT_TOKENS * (number > 0)
                most += sum(self._most.get(each, 1) for each in ids)
                if least > self._max_tokens:
                    raise ContextLengthError(
                        f"the text has more than {self._max_tokens} tokens, the context of this "
                        "model: shorten it",
                        param=param,
                    )
        return most

    def _encode(self, piece: str) -> list[int]:
        # Unlike the other methods that encode, the batch methods let other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def text_limit(info: ModelInfo) -> TextLimit | None:
    """Returns the limit of a model's texts; None, with a warning, for an unreadable tokenizer."""
    try:
        tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
    except Exception as error:  # tokenizers raises plain Exceptions
        _log.warning("the length of texts is not bounded before they are tokenized: %s", error)
        return None
    return TextLimit(tokenizer, info.max_context_length)


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text before spaces, where most tokenizers begin a word."""
    start = 0
    while len(text) - start > _PIECE_LENGTH:
        end = start + _PIECE_LENGTH
        cut = text.rfind(" ", start + 1, end)
        end = cut if cut > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
