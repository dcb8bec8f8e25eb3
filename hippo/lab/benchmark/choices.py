"""Which option an answer to a multiple-choice question chooses.

The rule is VLMEvalKit's ``can_infer`` (vlmeval/utils/matching_util.py): the only letter of an
option in the answer, else the only option whose text the answer has. It is applied first to what
an answer marks as its result, and to the last of several, as lmms-eval's parsers do. A letter
before a word in lower case that is no verb is an article or a name, and what follows "not" does not
count; a text counts only as whole words, and not within another option's text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

LETTERS = string.ascii_uppercase
_LAST_PHRASES = 8  # bounds the time for an answer that repeats itself
_MARKS = r"\s.,:;!?()\[\]{}*_`'\"“”’$"
_NOT_DENIED = r"(?<!\bnot )(?<!\*not\*\* )(?<!n't )"
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm)\s*\{)?([^{}]*)")
_PHRASE = re.compile(
    r"(?:\b(?:answer|option|choice)\b|答案|选项)(?:\W*\b(?:is|was|would be|should be|must be)\b"
    r"|\s*[*_]*\s*[:=：]|[是为])(?:\s*[:：])?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=\w\w)[.!?](?:\s|$)|\n")
_VERB = (
    r"(?:is|are|was|as|because|since|or|and|but|if|would|should|seems|looks|fits|matches|describes"
    r"|best)\b"
)


def choice_in(text: str, options: Sequence[str]) -> str | None:
    """Returns the letter of the option that an answer chooses; None if it chooses none or several.
    Thoughts before ``</think>`` do not count."""
    letters = LETTERS[: len(options)]
    for part in _parts(text.rpartition("</think>")[2].partition("<think>")[0]):
        words = _words(part)
        alike = _only(
            k for k, option in zip(letters, options, strict=True) if _words(option) == words
        )
        if alike and len(words) > 1:
            return alike
        if found := _letter_in(part, letters) or alike or _option_in(part, options):
            return found
    return None


def _parts(text: str) -> Iterator[str]:
    """Yields what may say the result, the clearest first."""
    for pattern in (_TAG, _BOXED):
        marked = pattern.findall(text)
        if marked:
            yield marked[-1]
    for phrase in reversed([*_PHRASE.finditer(text)][-_LAST_PHRASES:]):
        rest = text[phrase.end() :].lstrip()
        end = _SENTENCE_END.search(rest)
        yield rest[: end.start()] if end else rest
    yield text


def _letter_in(text: str, letters: str) -> str | None:
    """Returns the letter of an option that the text is or begins with as in a list, or else the
    only one in it."""
    small = letters.lower()
    if alone := re.fullmatch(rf"[{_MARKS}>-]*([{letters}{small}])[{_MARKS}]*", text):
        return alone[1].upper()
    if listed := re.match(rf"[{_MARKS}>-]*([{letters}{small}])[*_]*[.):\]\n]", text):
        others = re.findall(rf"(?m)^[{_MARKS}]*([{letters}])[.):]", text[listed.end() :])
        return None if others else listed[1].upper()
    token = (
        rf"{_NOT_DENIED}(?<![A-Za-z0-9_+#'’-])[{letters}](?![A-Za-z0-9_+#'’]|-\w)"
        rf"(?!\s+(?!{_VERB})[a-z])|(?<=[(\[])[{small}](?=[)\]])"
    )
    return _only(found.upper() for found in re.findall(token, text))


def _option_in(text: str, options: Sequence[str]) -> str | None:
    """Returns the letter of the only option that the text has, not within another option."""
    spaced = _spaced(text)
    found = [
        (letter, each.span())
        for letter, option in zip(LETTERS, options, strict=False)
        if (words := _words(option))
        for each in re.finditer(_NOT_DENIED + _bounded(words), spaced)
    ]
    return _only(
        letter
        for letter, (start, end) in found
        if not any(a <= start and end <= b and (a, b) != (start, end) for _, (a, b) in found)
    )


def _only(found: Iterator[str]) -> str | None:
    """Returns the letter if all that is found is the same one."""
    named = set(found)
    return named.pop() if len(named) == 1 else None


def _bounded(words: str) -> str:
    """Returns the pattern of a text that is not part of another word or number."""
    before = r"(?<![A-Za-z0-9_+#$-])(?<!\d[.,])" if words[0].isascii() else ""
    behind = r"(?![A-Za-z0-9_+#%]|-\w|[.,]\d)" if words[-1].isascii() else ""
    return before + re.escape(words) + behind


def _spaced(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> str:
    """Returns a text in lower case without the marks around it."""
    spaced = _spaced(text)
    return re.sub(rf"^[{_MARKS}]+|[{_MARKS}]+$", "", spaced) or spaced
