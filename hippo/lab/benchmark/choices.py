"""Which option an answer to a multiple-choice question chooses.

The rule is VLMEvalKit's ``can_infer`` (vlmeval/utils/matching_util.py): the only letter of an
option in the answer, else the only option whose text the answer has. It is applied first to what
an answer marks as its result, and to the last of several, as lmms-eval's parsers do. Other
differences: letters and texts that the answer denies do not count, nor does an "A" that is an
article; a letter at the beginning with a mark behind it counts in long answers too, where
VLMEvalKit wants it among the last words; a text counts only as whole words, and not within
another option's text.
"""

import re
import string
from collections.abc import Iterator, Sequence

LETTERS = string.ascii_uppercase
_LAST_PHRASES = 8  # bounds the time for an answer that repeats itself
_LAST_WORDS = 5  # VLMEvalKit's: a letter in a sentence counts among these
_MARKS = r"\s.,:;!?()\[\]{}*_`'\"“”’$"
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm)\s*\{)?([^{}]*)")
_PHRASE = re.compile(
    r"(?:\b(?:answer|option|choice)\b|答案|选项)(?:\W*\b(?:is|was|would be|should be|must be)\b"
    r"|\s*[*_]*\s*[:=：]|[是为])(?:\s*[:：])?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=\w\w)[.!?](?:\s|$)|\n")
_NEGATED_BEFORE = re.compile(
    r"(?:\bnot|n't|\bneither|\bnor|\bexcept)[\s*_]+(?:\w+\s+)?[\"'(*]*$", re.I
)
_NEGATED_BEHIND = re.compile(
    r"[^.!?,;\n]*?\b(?:is|are|was|were)\s*(?:not\b|n't|wrong|incorrect|false|ruled out)"
    r"|[^.!?,;\n]*?\b(?:isn't|wasn't|aren't)",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\b(?:answer|option|choice|choose|pick|select|chose)\W*$", re.IGNORECASE)
_VERB = r"(?:is|was|as|because|since|or|and|but|if|would|should|seems|looks|fits|matches|best)\b"


def choice_in(text: str, options: Sequence[str]) -> str | None:
    """Returns the letter of the option that an answer chooses; None if it chooses none or several.
    Thoughts before ``</think>`` do not count."""
    letters = LETTERS[: len(options)]
    for part in _parts(text.rpartition("</think>")[2].partition("<think>")[0]):
        found = _whole(part, options) or _letter_in(part, letters) or _option_in(part, options)
        if found is not None:
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
    """Returns the only letter of an option in the text."""
    either = f"{letters}{letters.lower()}"
    if alone := re.fullmatch(rf"[{_MARKS}>-]*([{either}])[{_MARKS}<]*", text):
        return alone[1].upper()
    if listed := re.match(rf"\s*[(\[]?([{letters.lower()}])[)\].:]\s", text):
        return listed[1].upper()
    token = rf"(?<![A-Za-z0-9_+#'’-])([{letters}])(?![A-Za-z0-9_+#'’]|-\w)"
    tokens = [
        each
        for each in re.finditer(token + rf"|(?<=[(\[])([{letters.lower()}])(?=[)\]])", text)
        if not _is_article(text, each) and not _is_denied(text, each)
    ]
    if not tokens:
        return None
    first = tokens[0]
    named = {(each[1] or each[2]).upper() for each in tokens}
    leads = re.match(rf"[{_MARKS}>-]*[{letters}][*_]*\)?\]?(?:[.):\n]|\s*[—–-])", text)
    is_first = leads is not None and leads.end() > first.start() and _is_listed(text, first)
    if is_first and not any(_is_listed(text, each) for each in tokens[1:]):
        return first[1]
    if len(named) > 1:
        return None
    is_marked = any(_is_pointed_at(text, each) for each in tokens)
    is_near_end = len(text[tokens[-1].end() :].split()) < _LAST_WORDS
    begins = re.fullmatch(rf"[{_MARKS}>-]*", text[: first.start()]) is not None
    return named.pop() if begins or is_first or is_marked or is_near_end else None


def _is_listed(text: str, letter: re.Match[str]) -> bool:
    """Whether a letter is alone in its line or has a mark behind it, as in a list of options."""
    return re.match(r"[*_]*(?:[.):\]\n—–-]|$)", text[letter.end() :]) is not None


def _is_article(text: str, letter: re.Match[str]) -> bool:
    """Whether it is the word "A" (or "I"): before a word in lower case that is no verb."""
    if _NAMED.search(text[max(letter.start() - 40, 0) : letter.start()]):
        return False
    return letter[1] in ("A", "I") and bool(
        re.match(rf"\s+(?!{_VERB})[a-z]|'[a-z]", text[letter.end() :])
    )


def _is_pointed_at(text: str, letter: re.Match[str]) -> bool:
    """Whether the words around a letter say that it is one of an option."""
    before, behind = _around(text, letter)
    named = _NAMED.search(before)
    enclosed = before.endswith(("(", "[", "**", '"')) and re.match(r"[)\]*\".:]", behind)
    right = re.match(r"\W*(?:is|was)\b[^.!?\n]*\b(?:correct|right|best|answer)", behind, re.I)
    return bool(named or enclosed or right)


def _around(text: str, found: re.Match[str]) -> tuple[str, str]:
    """Returns the words before and behind, of which no more are looked at."""
    return text[max(found.start() - 40, 0) : found.start()], text[found.end() : found.end() + 200]


def _is_denied(text: str, found: re.Match[str]) -> bool:
    before, behind = _around(text, found)
    return bool(_NEGATED_BEFORE.search(before) or _NEGATED_BEHIND.match(behind))


def _whole(text: str, options: Sequence[str]) -> str | None:
    """Returns the letter of the option that the text is, if it has more than one letter."""
    return _alike(text, options) if len(_words(text)) > 1 else None


def _alike(text: str, options: Sequence[str]) -> str | None:
    words = _words(text)
    alike = [letter for letter, option in zip(LETTERS, options, strict=False)
             if _words(option) == words]  # fmt: skip
    return alike[0] if len(alike) == 1 else None


def _option_in(text: str, options: Sequence[str]) -> str | None:
    """Returns the letter of the option that the text is, or else of the only one that it has."""
    if alike := _alike(text, options):
        return alike
    found = [
        (letter, each.span())
        for letter, option in zip(LETTERS, options, strict=False)
        if (words := _words(option))
        for each in re.finditer(_bounded(words), _spaced(text))
        if not _is_denied(_spaced(text), each)
    ]
    named = {
        letter
        for letter, (start, end) in found
        if not any(a <= start and end <= b and (a, b) != (start, end) for _, (a, b) in found)
    }
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
