"""One run of ``hippo caption``: several requests at once, and a line for each file that ends."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from hippo.client import tables
from hippo.client.json_lines import JsonLines
from hippo.client.requests import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    RequestForm,
    probe,
    question_about,
)
from hippo.client.server import Connection, Server
from hippo.client.uploads import sent_media
from hippo.errors import (
    ForbiddenError,
    HippoError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)

Line = dict[str, Any]
ResultT = TypeVar("ResultT")

# For the probe, so that a broken first video is not the server's fault.
_GREETING = question_about("Hello.")
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # before a request is sent again to a server that was unavailable
_BUSY_PAUSES_S = (0.5,) * 20 + (
    5.0,
) * 240  # before it is sent again to a server without a free slot
_MOST_NAMED = 10
_HASH_LENGTH = 16


@dataclass(slots=True, kw_only=True)
class CaptionRun:
    """Asks about the files of ``folder`` that have no line in ``out``.

    ``form`` is as for a server that takes every field.
    """

    folder: Path
    out: Path
    prompt: str
    seed: int
    server: Server
    form: RequestForm
    num_clients: int
    is_by_path: bool
    retries_errors: bool
    console: Console  # for the summary
    progress: Console  # for the progress bar
    _lines: dict[str, Line] = field(default_factory=dict)  # by path; the last line counts
    _is_over: threading.Event = field(default_factory=threading.Event)
    _has_uploads: bool = False

    def run(self) -> int:
        """Asks, and prints a summary; returns 1 if a file has no answer at the end, else 0.

        Raises InvalidRequestError for a folder without videos, and for a file of lines that were
        asked otherwise; HippoError if the server refuses every request, or is lost.
        """
        names = self._find_files()
        file = JsonLines(self.out, self._take, kind="line of captions")
        todo = [name for name in names if not self._is_done(name)]
        if len(todo) < len(names):
            known = len(names) - len(todo)
            self._say(f"{known} of {len(names)} files have a line in {self.out} already")
        if todo:
            with closing(self.server.connect()) as connection:
                form = probe(connection, _GREETING, self.form)
            self._has_uploads = form.is_hippo
            self.form = replace(form, is_hippo=False)
        began_s = time.perf_counter()
        found: list[Line] = []
        try:
            for line in tables.tracked(
                self._answers(todo), self.progress, title=self.folder.name, total=len(todo)
            ):
                file.append(line)
                self._lines[line["path"]] = line
                found.append(line)
        finally:
            self._is_over.set()
            self._sum_up(names, found, time.perf_counter() - began_s)
        return int(any("answer" not in self._lines[name] for name in names))

    @property
    def _request(self) -> str:
        """A hash of all that a request says, except the file."""
        said = [self.prompt, self.seed, self.form.model, self.form.max_tokens]
        further = {name: value for name, value in self.form.further.items()
                   if name != "speculative"}  # fmt: skip
        data = json.dumps([*said, self.form.temperature, further]).encode()
        return hashlib.sha256(data).hexdigest()[:_HASH_LENGTH]

    def _find_files(self) -> list[str]:
        """Returns the paths of videos and images below the folder, sorted."""
        suffixes = VIDEO_SUFFIXES + IMAGE_SUFFIXES
        names, others = [], Counter[str]()
        for path in sorted(self.folder.rglob("*")):
            if path.is_dir():
                continue
            if path.suffix.lower() in suffixes:
                names.append(path.relative_to(self.folder).as_posix())
            elif path.resolve() != self.out.resolve():
                others[path.suffix.lower() or path.name] += 1
        if not names:
            raise InvalidRequestError(
                f"there are no videos or images below {self.folder} ({', '.join(suffixes)})"
            )
        if others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common())
            self._say(f"left out, not known as videos or images: {kinds}")
        return names

    def _take(self, number: int, data: bytes) -> None:
        if number == 1 and data and not data.startswith(b'{"path"'):
            raise InvalidRequestError(f"{self.out} is no file of captions: give a new one")
        line = json.loads(data)
        if line["request"] != self._request:
            raise InvalidRequestError(
                f"{self.out}, line {number}: this was asked with another prompt, model, schema or "
                "option; ask the same, or give another file to --out"
            )
        self._lines[line["path"]] = line

    def _is_done(self, name: str) -> bool:
        line = self._lines.get(name)
        return line is not None and not ("error" in line and self.retries_errors)

    def _answers(self, names: list[str]) -> Iterator[Line]:
        """Yields the lines of ``names`` in the order of their ends. Raises an error that concerns
        more than a file; requests in progress then end with the process."""
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            todo.put(name)
        ended: queue.SimpleQueue[Line | Exception] = queue.SimpleQueue()
        for _ in range(min(self.num_clients, len(names))):
            threading.Thread(target=self._run_client, args=(todo, ended), daemon=True).start()
        for _ in names:
            line = ended.get()
            if isinstance(line, Exception):
                raise line
            yield line

    def _run_client(
        self, todo: queue.SimpleQueue[str], ended: queue.SimpleQueue[Line | Exception]
    ) -> None:
        """Asks about one file after another on a connection of its own."""
        with closing(self.server.connect()) as connection:
            while not self._is_over.is_set():
                try:
                    name = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    ended.put(self._line(connection, name))
                except Exception as error:
                    ended.put(error)
                    return

    def _line(self, connection: Connection, name: str) -> Line:
        began_s = time.perf_counter()
        try:
            answered = self._ask(connection, name)
        except UnavailableError:
            raise
        except HippoError as error:
            if isinstance(error, ForbiddenError | NotFoundError):
                self._check_access(connection)
            answered = {"error": error.message}
        seconds = round(time.perf_counter() - began_s, 3)
        return {"path": name, **answered, "seconds": seconds, "request": self._request}

    def _check_access(self, connection: Connection) -> None:
        """Raises HippoError if the server also refuses a request without a file, as it does after a
        key was revoked or a model is gone."""
        with suppress(OverloadedError):  # it would take the request
            probe(connection, _GREETING, self.form)

    def _ask(self, connection: Connection, name: str) -> Line:
        with ExitStack() as sent:
            media = self._patiently(lambda: sent.enter_context(self._media(self.folder / name)))
            question = question_about(self.prompt, media, name=name, seed=self.seed)
            body = self.form.request(question).body()
            answer = self._patiently(lambda: connection.ask(body))
        line: Line = {"answer": answer.text}
        if "response_format" in self.form.further:
            try:
                line["parsed"] = json.loads(answer.text)
            except ValueError:
                reason = f"the answer, which ended by {answer.finish_reason!r}, is no JSON"
                return {"error": f"{reason}: {answer.text}"}
        return {**line, "finish_reason": answer.finish_reason, "usage": answer.usage}

    def _media(self, path: Path) -> AbstractContextManager[str]:
        if self.is_by_path:
            return nullcontext(path.resolve().as_uri())
        return sent_media(self.server, str(path)) if self._has_uploads else nullcontext(str(path))

    def _patiently(self, request: Callable[[], ResultT]) -> ResultT:
        """Returns the outcome of a request, which is sent again while the server is busy, or away
        for a short time."""
        pauses, busy_pauses = iter(_PAUSES_S), iter(_BUSY_PAUSES_S)
        while True:
            try:
                return request()
            except (OverloadedError, UnavailableError) as error:
                is_busy = isinstance(error, OverloadedError)  # other clients may have the slots
                pause_s = next(busy_pauses if is_busy else pauses, None)
                if pause_s is None:
                    raise
            if self._is_over.wait(pause_s):
                raise UnavailableError("the run has ended")

    def _sum_up(self, names: list[str], found: list[Line], seconds: float) -> None:
        lines = [self._lines[name] for name in names if name in self._lines]
        failed = [line for line in lines if "error" in line]
        left = len(names) - len(lines)
        self._say(
            f"{len(names)} files: {len(lines) - len(failed)} answered, {len(failed)} failed"
            + (f", {left} left; the same command goes on" if left else "")
        )
        answered = [line for line in found if "answer" in line]
        if answered:
            num_tokens = sum(line["usage"].get("completion_tokens") or 0 for line in answered)
            self._say(
                f"{len(answered)} answers in {seconds:.1f} s: {60 * len(answered) / seconds:.1f} a "
                f"minute, {num_tokens / seconds:.0f} tokens a second"
            )
        for line in failed[:_MOST_NAMED]:
            self._say(f"failed: {line['path']}: {line['error']}")
        if len(failed) > _MOST_NAMED:
            self._say(f"and {len(failed) - _MOST_NAMED} more, which {self.out} names")

    def _say(self, text: str) -> None:
        self.console.print(text)
