"""The clients of a soak: most read their answers, some leave, some dawdle, some ask nonsense."""

import http.client
import json
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any, Literal
from urllib.parse import urlsplit

from hippo.client.answers import AnswerReader
from hippo.client.requests import Question
from hippo.client.server import error_from
from hippo.errors import HippoError, OverloadedError

Fate = Literal["reads", "leaves early", "leaves midway", "reads slowly", "asks nonsense"]
FATES: Mapping[Fate, int] = {
    "reads": 64,
    "leaves early": 12,
    "leaves midway": 12,
    "reads slowly": 6,
    "asks nonsense": 6,
}
"""Of a hundred requests, how many meet which end."""

POLICIES = ("adaptive",) * 4 + ("serial", "vpsd", "optimistic", "conservative", "off")
_SMALL_BUFFER = 4096  # bytes that a slow reader's kernel takes before it reads
_TIMEOUT_S = 60.0
_PAUSE_S = 0.05  # before a client asks again
_TOLD_LATER = "told to come later (429)"


def _about(url: str) -> dict[str, Any]:
    video = {"type": "video_url", "video_url": {"url": url}}
    turn = {"role": "user", "content": [video, {"type": "text", "text": "What is this?"}]}
    return {"messages": [turn]}


# What must be refused, with words.
NONSENSE: tuple[dict[str, Any], ...] = (
    *({"temperature": -1}, {"model": "another"}, {"max_tokens": 0}, {"colour": "blue"}),
    {"messages": []},
    _about("data:video/mp4;base64,AAAAIGZ0eXBpc29tAAACAGlzb20="),
    _about("file:///etc/passwd"),
    _about("https://169.254.169.254/clip.mp4"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its sampling, and the ids and reason that target-only ended it with."""

    question: Question
    fields: Mapping[str, Any]
    expected: tuple[tuple[int, ...], str] = ((), "")


@dataclass(slots=True)
class Tally:
    """What became of the requests; threads share it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what should not have been
    num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, *, num_tokens: int = 0, fault: str | None = None) -> None:
        """Counts one request that has ended."""
        with self._lock:
            self.outcomes[outcome] += 1
            self.num_tokens += num_tokens
            if fault is not None:
                self.faults.append(f"{outcome}: {fault}")


def body(task: Task, *, policy: str, salt: str | None = None) -> dict[str, Any]:
    """The request, streamed; without a salt what was cached before helps."""
    body = {
        "model": "hippo",
        "messages": list(task.question.messages),
        "max_tokens": 256,
        "stream": True,
        "return_token_ids": True,
        "speculative": {"policy": policy},
        **task.fields,
    }
    return body if salt is None else {**body, "cache_salt": salt}


@dataclass(slots=True)
class Visitor:
    """One client in a closed loop, until ``stop``."""

    url: str
    tasks: Sequence[Task]
    tally: Tally
    stop: threading.Event
    rng: random.Random

    def run(self) -> None:
        """Asks one request after the other."""
        while not self.stop.is_set():
            (fate,) = self.rng.choices(list(FATES), list(FATES.values()))
            try:
                self._visit(fate)
            except OverloadedError:
                self.tally.add(_TOLD_LATER)
                self.stop.wait(_PAUSE_S)
            except (HippoError, OSError, http.client.HTTPException) as error:
                self.tally.add("failed", fault=f"{type(error).__name__}: {error}")
                self.stop.wait(_PAUSE_S)

    def _visit(self, fate: Fate) -> None:
        task = self.rng.choice(self.tasks)
        salt = uuid.uuid4().hex if self.rng.random() < 0.5 else None
        asked = body(task, policy=self.rng.choice(POLICIES), salt=salt)
        if fate == "asks nonsense":
            asked |= self.rng.choice(NONSENSE)
        where = urlsplit(self.url)
        assert where.hostname is not None
        with closing(HTTPConnection(where.hostname, where.port, timeout=_TIMEOUT_S)) as connection:
            connection.connect()
            if fate == "reads slowly":
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
            headers = {"content-type": "application/json"}
            path = "/v1/chat/completions"
            connection.request("POST", path, json.dumps(asked).encode(), headers)
            if fate == "leaves early":
                time.sleep(self.rng.uniform(0.0, 0.4))
                self.tally.add(fate)
            elif fate == "asks nonsense":
                self._be_refused(connection.getresponse())
            else:
                self._read(connection.getresponse(), task, fate)

    def _read(self, response: HTTPResponse, task: Task, fate: Fate) -> None:
        if response.status != 200:
            raise error_from(response.status, response.read())
        reader, num_pieces = AnswerReader(), 0
        stays_for = self.rng.randrange(1, 60) if fate == "leaves midway" else None
        while data := response.read1(512 if fate == "reads slowly" else 1 << 16):
            num_pieces += len(reader.feed_data(data, time.perf_counter()))
            if stays_for is not None and num_pieces >= stays_for:
                self.tally.add(fate)
                return
            if fate == "reads slowly":
                time.sleep(self.rng.uniform(0.0, 0.05))
        answer = reader.answer(0.0)
        given = (answer.token_ids, answer.finish_reason)
        if given != task.expected:
            fault = f"{task.question.name} {dict(task.fields)}: {given} is not {task.expected}"
            self.tally.add("answered differently", fault=fault)
            return
        self.tally.add(f"{fate}: equal answer", num_tokens=len(answer.token_ids))

    def _be_refused(self, response: HTTPResponse) -> None:
        content = response.read()
        if 400 <= response.status < 500 and json.loads(content)["error"]["message"]:
            self.tally.add(_TOLD_LATER if response.status == 429 else "nonsense refused")
        else:
            self.tally.add("nonsense taken", fault=f"{response.status}: {content[:300]!r}")
