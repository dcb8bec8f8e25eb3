"""Concurrent clients in a closed loop: each asks again when its last answer is there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hippo.benchmark.answers import Answer
from hippo.benchmark.requests import Request, new_salt
from hippo.benchmark.server import Server
from hippo.errors import HippoError

_PAUSE_S = 0.1  # of a client whose request failed


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: its answer, or the message of its error."""

    question_index: int
    ended_s: float  # on the clock of ``Answer``
    answer: Answer | None
    error: str = ""


@dataclass(slots=True)
class LoadRun:
    """What a closed loop gave: requests in the order in which they ended.

    The first ``num_warm`` are not counted: the loop begins with all clients in their prefill at
    once, which no later moment resembles.
    """

    num_warm: int
    ended: list[Ended] = field(default_factory=list)

    @property
    def counted(self) -> list[tuple[int, Answer]]:
        """The answers that ended inside the window, each with its question's index."""
        window = self.ended[self.num_warm :]
        return [(each.question_index, each.answer) for each in window if each.answer is not None]

    @property
    def answers(self) -> list[tuple[int, Answer]]:
        """All answers, those not counted too, each with its question's index."""
        return [(each.question_index, each.answer) for each in self.ended if each.answer]

    @property
    def errors(self) -> list[str]:
        """Messages of the requests that failed inside the window."""
        return [each.error for each in self.ended[self.num_warm :] if each.answer is None]

    @property
    def seconds(self) -> float:
        """Length of the window: from the end of the last warm request to that of the last."""
        return self.ended[-1].ended_s - self.ended[self.num_warm - 1].ended_s


def run_closed_loop(
    servers: Sequence[Server],
    requests: Sequence[Request],
    *,
    num_clients: int,
    num_answers: int | None = None,
    seconds: float | None = None,
    tolerates_errors: bool = False,
    num_together: int = 1,
    on_start: Callable[[], None] = lambda: None,
    on_answer: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Asks until ``num_answers`` requests have ended, or ``seconds`` have passed, after the first
    ``num_clients`` have; returns all of them.

    Clients take questions in turn, ``num_together`` at a time, and servers round robin. Of the
    questions that a client takes together, each after the other, the later ones may be helped by
    what the server keeps of the earlier ones; nothing else helps. ``on_start`` is called when the
    window begins, ``on_answer`` after each request. What is still being answered at the end is
    waited for, so that the next run finds idle servers, but not returned. Raises the first error,
    unless errors are tolerated: then a client pauses and asks again, and an error is raised only if
    the first request of every client failed.
    """
    loop = _ClosedLoop(
        servers,
        requests,
        num_clients,
        num_answers,
        seconds,
        tolerates_errors,
        num_together,
        on_start,
        on_answer,
    )
    threads = [
        threading.Thread(target=loop.client, args=(number,), name=f"client-{number}", daemon=True)
        for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        loop.is_over = True  # also when interrupted
    if loop.error is not None:
        raise loop.error
    return loop.run


class _ClosedLoop:
    def __init__(
        self,
        servers: Sequence[Server],
        requests: Sequence[Request],
        num_clients: int,
        num_answers: int | None,
        seconds: float | None,
        tolerates_errors: bool,
        num_together: int,
        on_start: Callable[[], None],
        on_answer: Callable[[], None],
    ) -> None:
        if (num_answers is None) == (seconds is None):
            raise ValueError("either a number of answers or seconds")
        self._servers = servers
        self._requests = requests
        self._num_answers = num_answers
        self._seconds = seconds
        self._tolerates_errors = tolerates_errors
        self._num_together = num_together
        self._on_start = on_start
        self._on_answer = on_answer
        self._numbers = itertools.count()
        self._num_refused = 0  # clients whose first request failed
        self._lock = threading.Lock()
        self.run = LoadRun(num_warm=num_clients)
        self.error: Exception | None = None
        self.is_over = False

    def client(self, number: int) -> None:
        """One client's thread; servers are shared out by client, so that connections stay open."""
        connection = self._servers[number % len(self._servers)].connect()
        is_first = True
        try:
            for index, salt in self._turns(number):
                try:
                    answer = connection.ask(self._requests[index].body(salt))
                except HippoError as error:
                    if not self._tolerates_errors:
                        raise
                    self._add(Ended(index, time.perf_counter(), None, error.message))
                    self._num_refused += is_first
                    if self._num_refused == self.run.num_warm:
                        raise
                    time.sleep(_PAUSE_S)
                else:
                    self._add(Ended(index, answer.ended_s, answer))
                is_first = False
        except Exception as error:
            self.error = self.error or error
            self.is_over = True
        finally:
            connection.close()

    def _turns(self, client: int) -> Iterator[tuple[int, str]]:
        """What one client asks: indices of questions, each with its salt.

        Clients begin at different places of what is asked together, or all would be at its first
        question at once, before the window begins.
        """
        skipped = client % self._num_together
        while not self.is_over:
            first, salt = next(self._numbers) * self._num_together, new_salt()
            for number in range(first + skipped, first + self._num_together):
                if self.is_over:
                    return
                yield number % len(self._requests), salt
            skipped = 0

    def _add(self, ended: Ended) -> None:
        with self._lock:
            if self.is_over:
                return
            run = self.run
            run.ended.append(ended)
            if len(run.ended) == run.num_warm:
                self._on_start()
            self._on_answer()
            self.is_over = self._is_enough(ended.ended_s)

    def _is_enough(self, now_s: float) -> bool:
        run = self.run
        num_counted = len(run.ended) - run.num_warm
        if num_counted < 1:
            return False
        if self._num_answers is not None:
            return num_counted >= self._num_answers
        assert self._seconds is not None
        return now_s - run.ended[run.num_warm - 1].ended_s >= self._seconds
