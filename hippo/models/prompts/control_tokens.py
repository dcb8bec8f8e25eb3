"""Keeps the texts of messages free of control tokens: a name in a text is written as other text is.

A chat template puts texts and its control tokens into one string, in which both look the same.
Before that, the first character of each name in a text is replaced by a stand-in (here "?"), which
no name contains:

    texts      <|im_end|>, bye
    masked     ?|im_end|>, bye
    rendered   <|im_start|>user\\n?|im_end|>, bye<|im_end|>\\n
    encoded    [<|im_start|>] user\\n<|im_end|>, bye [<|im_end|>] \\n

The runs of text between two control tokens that have stand-ins are encoded alone, and all else as
without such texts. A stand-in is as long as what it stands for, so that offsets stay.
"""

import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from hippo.models.prompts.layout import MediaMark
from hippo.models.prompts.messages import texts_of, with_texts
from hippo.types import ChatMessage

# Stand-ins are lone surrogates: no text has one that comes from a client, because UTF-8 has none.
_FIRST_STAND_IN = 0xD800
_STAND_IN = re.compile("[\ud800-\udfff]")


class ControlTokens:
    """The names of a tokenizer's control tokens, and of what stands for media.

    Control tokens are the added tokens that the tokenizer marks as special. Other added tokens,
    such as Qwen3's <think>, are tokens in a text, too.
    """

    def __init__(self, tokenizer: Any, marks: Iterable[MediaMark]) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special}
        names |= {name for mark in marks for name in (mark.token, mark.placeholder)}
        firsts = _by_first(names)
        self._tokenizer = tokenizer
        # The longest first, as the tokenizer prefers them.
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._beginnings = re.compile(
            "|".join(rf"{re.escape(one)}(?={_spaced(rests)})" for one, rests in firsts.items())
        )
        self._stand_ins = {one: chr(_FIRST_STAND_IN + i) for i, one in enumerate(firsts)}
        self._firsts = str.maketrans({there: one for one, there in self._stand_ins.items()})

    def mask(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Returns the messages with stand-ins; the same ones if the texts have no name.

        A name may begin in one text and end in another, and a template may strip the white space
        between the two; so white space within a name does not count.
        """
        texts = list(texts_of(messages))
        whole = "".join(texts)
        masked = self._beginnings.sub(lambda found: self._stand_ins[found.group()], whole)
        if masked == whole:
            return messages
        rest = io.StringIO(masked)
        return with_texts(messages, [rest.read(len(text)) for text in texts])

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a rendered text, its stand-ins taken back, and the first and last
        character of each token."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end, is_content in self._pieces(text):
            piece = text[start:end]
            encoding = self._tokenizer(
                piece.translate(self._firsts) if is_content else piece,
                add_special_tokens=start == 0,
                split_special_tokens=is_content,
                return_offsets_mapping=True,
            )
            ids += encoding["input_ids"]
            offsets += [(start + first, start + last) for first, last in encoding["offset_mapping"]]
        return ids, offsets

    def _pieces(self, text: str) -> Iterator[tuple[int, int, bool]]:
        """Yields start and end of each piece to encode, and whether names in it are mere text."""
        cursor = 0
        for start, end in self._runs(text) if _STAND_IN.search(text) else ():
            if _STAND_IN.search(text, start, end):
                yield cursor, start, False
                yield start, end, True
                cursor = end
        yield cursor, len(text), False

    def _runs(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields start and end of what is between control tokens."""
        start = 0
        for name in self._names.finditer(text):
            yield start, name.start()
            start = name.end()
        yield start, len(text)


def _by_first(names: Collection[str]) -> dict[str, set[str]]:
    """Returns what follows each first character."""
    firsts = sorted({name[0] for name in names})
    return {one: {name[1:] for name in names if name[0] == one} for one in firsts}


def _spaced(names: Collection[str]) -> str:
    """Returns a pattern of the names with any white space before each character. It is a tree of
    characters, so that no white space is searched once for each name."""
    if "" in names:
        return ""
    branches = (re.escape(one) + _spaced(rests) for one, rests in _by_first(names).items())
    return rf"\s*+(?:{'|'.join(branches)})"
