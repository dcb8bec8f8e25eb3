"""Questions about videos from a JSONL file, and whether an answer is right."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hippo.client.requests import REMOTE, Question, question_about
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.choices import LETTERS, choice_in

_BY_LETTER = "Answer with the option's letter from the given choices directly."


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoQuestion:
    """A question about a video; ``answer`` is an option's letter if there are options."""

    id: str
    video: str  # a local path or a URL
    prompt: str  # the whole text that is sent
    options: tuple[str, ...] = ()
    answer: str | None = None  # None: not scored
    category: str = ""

    def asked(self, media: str, *, seed: int) -> Question:
        """Returns the question to send about ``media``, which stands for the video in the request.
        Raises InvalidRequestError if it is a file that cannot be read."""
        return question_about(self.prompt, media, name=self.id, seed=seed)

    def is_right(self, text: str) -> bool | None:
        """Returns whether ``text`` answers the question rightly; None if no answer is known.

        With options, ``text`` must choose the right one, by letter or words. Without, it must equal
        the answer but for case, punctuation and white space.
        """
        if self.answer is None:
            return None
        if self.options:
            return choice_in(text, self.options) == self.answer
        return _normal(text) == _normal(self.answer)


def choice_prompt(question: str, options: Sequence[str]) -> str:
    """Returns the text of a question; options are lines "A. ...", as LongVideoBench has them."""
    if not options:
        return question
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, *lines, _BY_LETTER])


def read_questions(path: Path, videos: str | None = None) -> list[VideoQuestion]:
    """Returns the questions of a file with one JSON object per line.

    A relative `video` is below ``videos``, a folder or the beginning of a URL, or else beside the
    file. Raises InvalidRequestError that names the line for one that is no question, an `id` that
    occurs twice, or a local video that is no file.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(f"{path} cannot be read: {reason}") from None
    found: dict[str, VideoQuestion] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _question(line, videos or str(path.parent))
            if question.id in found:
                raise ValueError(f"the id {question.id!r} stands there twice")
        except ValueError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}") from None
        found[question.id] = question
    if not found:
        raise InvalidRequestError(f"{path} has no questions")
    return list(found.values())


def _question(line: str, videos: str) -> VideoQuestion:
    """Returns the question of a line. Raises ValueError, with the reason, if it is none."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError('expected a JSON object such as {"id": "1", "video": "a.mp4", ...}')
    number = fields.get("id")
    if isinstance(number, int) and not isinstance(number, bool):
        fields["id"] = str(number)
    for name in ("id", "video", "question"):
        if not fields.get(name):
            raise ValueError(f"`{name}` is missing")
    for name in ("id", "video", "question", "prompt", "answer", "category"):
        if not isinstance(fields.get(name) or "", str):
            raise ValueError(f"`{name}` must be a text, not {json.dumps(fields[name])}")
    options = fields.get("options") or []
    if not isinstance(options, list) or not all(isinstance(each, str) for each in options):
        raise ValueError("`options` must be a list of texts")
    if len(options) > len(LETTERS):
        raise ValueError(f"`options` may have at most {len(LETTERS)} texts")
    return VideoQuestion(
        id=fields["id"],
        video=_video(fields["video"], videos),
        prompt=fields.get("prompt") or choice_prompt(fields["question"], options),
        options=tuple(options),
        answer=_answer(fields, options),
        category=fields.get("category") or "",
    )


def _video(name: str, videos: str) -> str:
    if name.startswith(REMOTE):
        return name
    if videos.startswith(REMOTE):
        return f"{videos.rstrip('/')}/{name}"
    path = Path(videos).expanduser() / name
    if not path.is_file():
        raise ValueError(f"there is no video {path}")
    return str(path)


def _answer(fields: dict[str, Any], options: Sequence[str]) -> str | None:
    """Returns the right answer, which may be given as an option's text or as its letter."""
    answer: str | None = fields.get("answer") or None
    if answer is None or not options:
        return answer
    if answer in options:
        return LETTERS[options.index(answer)]
    if answer in LETTERS[: len(options)]:
        return answer
    last = LETTERS[len(options) - 1]
    raise ValueError(f"`answer` must be one of the options or a letter from A to {last}")


def _normal(text: str) -> str:
    """Returns the words of a text in lower case; of one without words, its marks."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()
