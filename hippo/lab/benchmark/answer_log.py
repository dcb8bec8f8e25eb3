"""A file of answers with which a stopped measurement goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hippo.client.answers import Answer
from hippo.client.json_lines import JsonLines
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.video_questions import VideoQuestion

Line = Mapping[str, Any]


class AnswerLog:
    """Answers by (question's id, system's name), each a line of a JSONL file.

    The first line holds the settings of the measurement. A last line that is not whole is removed.
    Raises InvalidRequestError for a file of other settings or of other content, which stays as it
    is, and for one that cannot be written.
    """

    def __init__(self, path: Path, settings: Line) -> None:
        self._path = path
        self._settings = settings
        self._prompts: dict[tuple[str, str], str] = {}
        self.answers: dict[tuple[str, str], Answer] = {}
        self._file = JsonLines(path, self._take, kind="answer")
        if self._file.is_empty:
            self._file.append(settings)

    def has(self, question: VideoQuestion, system: str) -> bool:
        """Returns whether the system's answer is there.

        Raises InvalidRequestError if it answers another question with the same id.
        """
        key = (question.id, system)
        if self._prompts.get(key, question.prompt) != question.prompt:
            raise InvalidRequestError(
                f"{self._path} holds an answer to another question with the id {question.id!r}: "
                "give another file to --answers"
            )
        return key in self.answers

    def add(self, question: VideoQuestion, system: str, answer: Answer) -> None:
        """Appends an answer."""
        self.answers[question.id, system] = answer
        self._file.append(
            {
                "id": question.id,
                "system": system,
                "prompt": question.prompt,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "piece_s": [round(each - answer.asked_s, 6) for each in answer.piece_s],
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "figures": answer.figures,
            }
        )

    def _check(self, head: bytes) -> None:
        settings = self._settings
        try:
            found = json.loads(head)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "max_tokens" not in found:
            raise InvalidRequestError(f"{self._path} is no file of answers: give a new one")
        differing = [f"{name} {found.get(name)}" for name in settings
                     if found.get(name) != settings[name]]  # fmt: skip
        if differing:
            raise InvalidRequestError(
                f"{self._path} holds answers measured with {', '.join(differing)}: "
                "measure with the same, or give another file to --answers"
            )

    def _take(self, number: int, data: bytes) -> None:
        if number == 1 and data:
            self._check(data)
            return
        line = json.loads(data)
        key = (line["id"], line["system"])
        self._prompts[key] = line["prompt"]
        self.answers[key] = Answer(
            text=line["text"],
            asked_s=0.0,
            piece_s=tuple(line["piece_s"]),
            token_ids=tuple(line["token_ids"]),
            finish_reason=line["finish_reason"],
            usage=line["usage"],
            figures=line["figures"],
        )
