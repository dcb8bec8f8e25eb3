"""``hippo caption``: asks one question about every video of a folder; a JSON line for each."""

import argparse
import hashlib
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
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
from hippo.client.server import KEY_VARIABLE, Connection, Server
from hippo.client.uploads import sent_media
from hippo.errors import (
    ForbiddenError,
    HippoError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from hippo.speculation.policies import POLICY_NAMES

Line = dict[str, Any]
ResultT = TypeVar("ResultT")

# For the probe, so that a broken first video is not the server's fault.
_GREETING = question_about("Hello.")
# Before a request is sent again to a server that was unavailable, or had no free slot.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_BUSY_PAUSES_S = (0.5,) * 20 + (5.0,) * 240
_MOST_NAMED = 10

HELP = "ask about every video of a folder"
DESCRIPTION = """\
Asks one question about every video and image in a folder and its subfolders, several at once, and
appends a JSON line for each to a file. A file that cannot be answered gets a line with the reason.
The same command goes on where an earlier one stopped.
"""
EXAMPLES = """\
examples:
  hippo caption videos --prompt "Describe the video." --out captions.jsonl
  hippo caption videos --prompt-file prompt.txt --schema scene.json --out scenes.jsonl
  hippo caption videos --prompt "Describe the video." --out captions.jsonl --retry-errors
  hippo caption /data/videos --prompt "What happens?" --out captions.jsonl --by-path
  hippo caption videos --prompt "What happens?" --out captions.jsonl --url http://vllm:8000

A line of an answer has `path` (below the folder), `answer`, `reasoning` (of a model that thinks),
`parsed` (with --schema), `usage`, `finish_reason`, `seconds` and `request`, a hash of the question
and its options. A line of an error has `path`, `error`, `seconds` and `request`. If a path has
several lines, the last line counts.
The exit code is 1 if a file has no answer at the end. Ctrl-C stops; no line is lost.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="searched with its subfolders")
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL; lines are appended")
    prompt = parser.add_mutually_exclusive_group(required=True).add_argument
    prompt("--prompt", help="the question")
    prompt("--prompt-file", type=Path, metavar="FILE", help="a text file with the question")
    add("--schema", type=Path, metavar="FILE", help="a JSON schema, which every answer follows")
    add("--no-thinking", action="store_true", help="answers without a thought before")
    add("--concurrency", type=int, default=4, help="requests at once (default: %(default)s)")
    add("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--seed", type=int, default=0, help="of every request (default: %(default)s)")
    add("--policy", choices=POLICY_NAMES, help="of a hippo gateway (default: the gateway's)")
    add(
        "--by-path",
        action="store_true",
        help="send file:// URLs, for a server that may open the folder's files itself; else the "
        "files are sent",
    )
    add("--retry-errors", action="store_true", help="ask again about files with an error")
    add("--url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add("--model", help="default: the first one that the server serves")


def run(arguments: argparse.Namespace) -> int:
    """Asks about every file that has no line yet; returns the exit code."""
    for name, least in (("concurrency", 1), ("max_tokens", 1), ("temperature", 0), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least {least}")
    if not arguments.folder.is_dir():
        raise InvalidRequestError(f"there is no folder {arguments.folder}")
    if not arguments.out.parent.is_dir():
        raise InvalidRequestError(f"--out: there is no folder {arguments.out.parent}")
    return CaptionRun(arguments).run()


class CaptionRun:
    """Asks about the files of a folder that have no line in the file of captions.

    Several requests are at work at once; a line is written for each file that ends.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises InvalidRequestError for what cannot be asked, and HippoError if the server cannot
        tell its models."""
        self._given = arguments
        self._folder, self._out = arguments.folder, arguments.out
        further: dict[str, Any] = {}
        if arguments.schema is not None:
            schema = {"name": arguments.schema.stem, "schema": _schema(arguments.schema)}
            further["response_format"] = {"type": "json_schema", "json_schema": schema}
        if arguments.no_thinking:
            further["chat_template_kwargs"] = {"enable_thinking": False}
        self._server = Server(arguments.url, api_key=os.environ.get(KEY_VARIABLE) or None)
        given = arguments.prompt
        self._prompt = (_read(arguments.prompt_file) if given is None else given).strip()
        if not self._prompt:
            raise InvalidRequestError("the prompt is empty")
        model = arguments.model or self._server.models()[0]
        sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        # All that a request says, except the file and the policy.
        said = [self._prompt, arguments.seed, model, *sampling.values(), further]
        self._request = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        if arguments.policy is not None:
            further["speculative"] = {"policy": arguments.policy}
        optional = ("stream_options", "seed")
        self._form = RequestForm(model=model, optional=optional, further=further, **sampling)
        self._say = Console(soft_wrap=True, highlight=False, markup=False).print
        self._lines: dict[str, Line] = {}  # by path; the last line counts
        self._is_over = threading.Event()
        self._has_uploads = False

    def run(self) -> int:
        """Asks, and prints a summary; returns 1 if a file has no answer at the end, else 0.

        Raises InvalidRequestError for a folder without videos, and for a file of lines that were
        asked otherwise; HippoError if the server refuses every request, or is lost.
        """
        names = self._find_files()
        file = JsonLines(self._out, self._take, kind="line of captions")
        retried = [name for name, line in self._lines.items() if "error" in line]
        done = self._lines.keys() - (retried if self._given.retry_errors else ())
        todo = [name for name in names if name not in done]
        if known := len(names) - len(todo):
            self._say(f"{known} of {len(names)} files have a line in {self._out} already")
        if todo:
            with closing(self._server.connect()) as connection:
                form = probe(connection, _GREETING, self._form)
            self._has_uploads = form.is_hippo
            self._form = replace(form, is_hippo=False)
        began_s = time.perf_counter()
        found: list[Line] = []
        try:
            for line in tables.tracked(
                self._answers(todo), Console(stderr=True), title=self._folder.name, total=len(todo)
            ):
                file.append(line)
                self._lines[line["path"]] = line
                found.append(line)
        finally:
            self._is_over.set()
            self._sum_up(names, found, time.perf_counter() - began_s)
        return int(any("answer" not in self._lines[name] for name in names))

    def _find_files(self) -> list[str]:
        """Returns the paths of videos and images below the folder, sorted."""
        suffixes = VIDEO_SUFFIXES + IMAGE_SUFFIXES
        names, others = [], Counter[str]()
        for path in sorted(each for each in self._folder.rglob("*") if not each.is_dir()):
            if path.suffix.lower() in suffixes:
                names.append(path.relative_to(self._folder).as_posix())
            elif path.resolve() != self._out.resolve():
                others[path.suffix.lower() or path.name] += 1
        if not names:
            raise InvalidRequestError(
                f"there are no videos or images below {self._folder} ({', '.join(suffixes)})"
            )
        if others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common())
            self._say(f"left out, not known as videos or images: {kinds}")
        return names

    def _take(self, number: int, data: bytes) -> None:
        if number == 1 and data and not data.startswith(b'{"path"'):
            raise InvalidRequestError(f"{self._out} is no file of captions: give a new one")
        line = json.loads(data)
        if line["request"] != self._request:
            raise InvalidRequestError(
                f"{self._out}, line {number}: this was asked with another prompt, model, schema or "
                "option; ask the same, or give another file to --out"
            )
        self._lines[line["path"]] = line

    def _answers(self, names: list[str]) -> Iterator[Line]:
        """Yields the lines of ``names`` in the order of their ends. Raises an error that concerns
        more than a file; requests in progress then end with the process."""
        todo = iter(names)  # its next item goes to one of the clients
        ended: queue.SimpleQueue[Line | Exception] = queue.SimpleQueue()

        def ask_one_after_another() -> None:
            with closing(self._server.connect()) as connection:
                for name in todo:
                    if self._is_over.is_set():
                        return
                    try:
                        ended.put(self._line(connection, name))
                    except Exception as error:
                        ended.put(error)
                        return

        for _ in range(min(self._given.concurrency, len(names))):
            threading.Thread(target=ask_one_after_another, daemon=True).start()
        for _ in names:
            line = ended.get()
            if isinstance(line, Exception):
                raise line
            yield line

    def _line(self, connection: Connection, name: str) -> Line:
        began_s = time.perf_counter()
        try:
            answered = self._ask(connection, name)
        except UnavailableError:
            raise
        except HippoError as error:
            if isinstance(error, ForbiddenError | NotFoundError):
                # Raises the error if the server also refuses a request without a file, as it does
                # after a key was revoked or a model is gone.
                with suppress(OverloadedError):  # it would take the request
                    probe(connection, _GREETING, self._form)
            answered = {"error": error.message}
        seconds = round(time.perf_counter() - began_s, 3)
        return {"path": name, **answered, "seconds": seconds, "request": self._request}

    def _ask(self, connection: Connection, name: str) -> Line:
        with ExitStack() as sent:
            media = self._patiently(lambda: sent.enter_context(self._media(self._folder / name)))
            question = question_about(self._prompt, media, name=name, seed=self._given.seed)
            body = self._form.request(question).body()
            answer = self._patiently(lambda: connection.ask(body))
        if answer.thought and not answer.text.strip() and answer.finish_reason == "length":
            return {"error": "the thought took all of --max-tokens: raise it, or --no-thinking"}
        line: Line = {"answer": answer.text}
        if answer.thought:
            line = {"answer": answer.text.lstrip(), "reasoning": answer.thought}
        if "response_format" in self._form.further:
            try:
                line["parsed"] = json.loads(answer.text)
            except ValueError:
                reason = f"the answer, which ended by {answer.finish_reason!r}, is no JSON"
                return {"error": f"{reason}: {answer.text}"}
        return {**line, "finish_reason": answer.finish_reason, "usage": answer.usage}

    def _media(self, path: Path) -> AbstractContextManager[str]:
        if self._given.by_path:
            return nullcontext(path.resolve().as_uri())
        return sent_media(self._server, str(path)) if self._has_uploads else nullcontext(str(path))

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
            self._say(f"and {len(failed) - _MOST_NAMED} more, which {self._out} names")


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(_read(path))
    except ValueError as error:
        raise InvalidRequestError(f"--schema: {path} is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"--schema: {path} holds no JSON object")
    return schema


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(f"{path} cannot be read: {reason}") from None
