"""Concurrent clients in a closed loop: each asks again when its last request has ended."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hippo.client.answers import Answer
from hippo.client.requests import Request
from hippo.client.server import Server
from hippo.errors import HippoError

_PAUSE_S = 0.1  # after a request that failed


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: its answer, or the message of its error."""

    question_index: int
    ended_s: float  # on the clock of ``Answer``'s times
    answer: Answer | None
    error: str = ""


@dataclass(slots=True)
class LoadRun:
    """The requests of a closed loop, in the order of their ends.

    The first ``num_warm`` are not counted, because all clients begin with a prefill at the same
    time, which does not happen again.
    """

    num_warm: int
    ended: list[Ended] = field(default_factory=list)

    @property
    def counted(self) -> list[tuple[int, Answer]]:
        """Question index and answer of the requests answered inside the window."""
        window = self.ended[self.num_warm :]
        return [(each.question_index, each.answer) for each in window if each.answer is not None]

    @property
    def answers(self) -> list[tuple[int, Answer]]:
        """Question index and answer of all answered requests, warm ones included."""
        return [(each.question_index, each.answer) for each in self.ended if each.answer]

    @property
    def errors(self) -> list[str]:
        """Messages of the requests that failed inside the window."""
        return [each.error for each in self.ended[self.num_warm :] if each.answer is None]

    @property
    def seconds(self) -> float:
        """Length of the window, from the end of the last warm request to the last end."""
        return self.ended[-1].ended_s - self.ended[self.num_warm - 1].ended_s


@dataclass(slots=True)
class ClosedLoop:
    """Runs ``num_clients`` clients. The window begins when ``num_clients`` requests have ended, and
    ends after ``num_answers`` further requests or ``seconds``; exactly one of the two is given.

    Clients take questions in turn, and servers round robin. No request can reuse what the server
    has cached of another. ``on_start`` is called when the window begins, ``on_answer`` after each
    request.
    """

    servers: Sequence[Server]
    requests: Sequence[Request]
    num_clients: int
    num_answers: int | None = None
    seconds: float | None = None
    tolerates_errors: bool = False
    on_start: Callable[[], None] = lambda: None
    on_answer: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _num_refused: int = 0  # clients whose first request failed
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _run: LoadRun = field(init=False)
    _error: Exception | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        if (self.num_answers is None) == (self.seconds is None):
            raise ValueError("either a number of answers or seconds")
        self._run = LoadRun(num_warm=self.num_clients)

    def run(self) -> LoadRun:
        """Runs all clients to the end of the window; returns the requests that ended before it.

        It waits for requests in progress, so that the servers are idle for the next run. Raises the
        first error; with ``tolerates_errors`` a client pauses and asks again, and an error is
        raised only if the first request of every client failed.
        """
        threads = [
            threading.Thread(
                target=self._run_client, args=(number,), name=f"client-{number}", daemon=True
            )
            for number in range(self.num_clients)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._is_over = True  # also when interrupted
        if self._error is not None:
            raise self._error
        return self._run

    def _run_client(self, number: int) -> None:
        """Runs one client, in its own thread and with one connection to one server."""
        connection = self.servers[number % len(self.servers)].connect()
        is_first = True
        try:
            while not self._is_over:
                index = next(self._numbers) % len(self.requests)
                try:
                    answer = connection.ask(self.requests[index].body())
                except HippoError as error:
                    if not self.tolerates_errors:
                        raise
                    self._add_ended(Ended(index, time.perf_counter(), None, error.message))
                    with self._lock:
                        self._num_refused += is_first
                        are_all_refused = self._num_refused == self._run.num_warm
                    if are_all_refused:
                        raise
                    time.sleep(_PAUSE_S)
                else:
                    self._add_ended(Ended(index, answer.ended_s, answer))
                is_first = False
        except Exception as error:
            self._error = self._error or error
            self._is_over = True
        finally:
            connection.close()

    def _add_ended(self, ended: Ended) -> None:
        with self._lock:
            if self._is_over:
                return
            run = self._run
            run.ended.append(ended)
            if len(run.ended) == run.num_warm:
                self.on_start()
            self.on_answer()
            self._is_over = self._is_enough(ended.ended_s)

    def _is_enough(self, now_s: float) -> bool:
        run = self._run
        num_counted = len(run.ended) - run.num_warm
        if num_counted < 1:
            return False
        if self.num_answers is not None:
            return num_counted >= self.num_answers
        assert self.seconds is not None
        return now_s - run.ended[run.num_warm - 1].ended_s >= self.seconds
