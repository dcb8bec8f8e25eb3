"""Rank 0's control of the followers' processes: start, commands, supervision, end."""

import contextlib
import logging
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from hippo.base.subprocesses import importing_environment
from hippo.errors import HippoError, ModelLoadError, UnavailableError
from hippo.models.interface.plan import LoadPlan
from hippo.parallel.commands import Command, Stop
from hippo.parallel.help import Told

_log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


class FollowerProcesses:
    """Starts one process for each rank other than 0, which loads its part of ``plan``, or a prefill
    helper's process, if the plan is of first layers.

    ``lost`` is set when a process ends unexpectedly. ``stop`` and ``wait_ended`` end the processes;
    they also exit when this process ends.
    """

    def __init__(
        self,
        plan: LoadPlan,
        rendezvous: str,
        lost: Future[HippoError],
        *,
        memory: int | None = None,
    ) -> None:
        """``rendezvous``: file where the ranks meet; ``memory``: descriptor of a file that a helper
        shares, and which stays open here."""
        self.lost = lost
        self.on_news: Callable[[Told], None] = lambda news: None  # of a helper
        self._is_closing = False
        self._followers: list[_Follower] = []
        try:
            for rank in range(1, 2 if plan.first_layers else plan.tensor_parallel):
                self._followers.append(_Follower(plan, rank, rendezvous, memory, self))
        except OSError as error:
            self.stop()
            self.wait_ended()
            raise ModelLoadError(f"a follower's process cannot be started: {error}") from error

    def wait_ready(self) -> None:
        """Waits until all ranks have loaded their part; raises the error of ``lost``."""
        for follower in self._followers:
            follower.is_ready.wait()
        if self.lost.done():
            raise self.lost.result()

    def send_command(self, command: Command) -> None:
        """Sends a command to all followers; raises UnavailableError if one has ended."""
        message = pickle.dumps(command)
        for follower in self._followers:
            try:
                follower.commands.send_bytes(message)
            except OSError:
                raise UnavailableError(f"{follower.name} has gone") from None

    def give_up(self, error: HippoError) -> None:
        """Sets ``lost``, unless it is set, and kills the processes; does nothing after ``stop``."""
        if self._is_closing:
            return
        with contextlib.suppress(InvalidStateError):
            self.lost.set_result(error)
        for follower in list(self._followers):
            follower.process.kill()

    def stop(self) -> None:
        """Tells all processes to stop, and kills those that still load."""
        self._is_closing = True
        with contextlib.suppress(UnavailableError):
            self.send_command(Stop())
        for follower in self._followers:
            if not follower.is_ready.is_set():
                follower.process.kill()

    def wait_ended(self) -> None:
        """Waits after ``stop`` for all processes to end, and kills those that do not."""
        for follower in self._followers:
            follower.end()


class _Follower:
    """One process, its pipes, and the thread that reads its reports."""

    def __init__(
        self,
        plan: LoadPlan,
        rank: int,
        rendezvous: str,
        memory: int | None,
        owner: FollowerProcesses,
    ) -> None:
        self.name = "the prefill helper" if plan.first_layers else f"rank {rank}"
        self.is_ready = threading.Event()  # or has ended
        self._owner = owner
        self._failure = ""
        with contextlib.ExitStack() as on_failure:
            theirs, self.commands = Pipe(duplex=False)
            self._reports, their_reports = Pipe(duplex=False)
            on_failure.callback(self.commands.close)
            on_failure.callback(self._reports.close)
            with theirs, their_reports:
                self.process = _start(rank, rendezvous, memory, (theirs, their_reports))
            with contextlib.suppress(BrokenPipeError):  # it has ended: _listen tells how
                self.commands.send(plan)
            on_failure.pop_all()
        self._listener = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Waits for the process to end, kills it if it does not, and closes the pipes."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.commands.close()
        self._reports.close()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, *rest = self._reports.recv()
                if kind == "log":
                    level, text = rest
                    _log.log(level, "%s: %s", self.name, text)
                elif kind == "failed":
                    (self._failure,) = rest
                elif kind == "news":
                    self._owner.on_news(*rest)
                else:
                    self.is_ready.set()
        code = self.process.wait()
        was_ready = self.is_ready.is_set()
        self._owner.give_up(self._error(code, was_ready))
        self.is_ready.set()

    def _error(self, code: int, was_ready: bool) -> HippoError:
        if self._failure and not was_ready:
            return ModelLoadError(f"{self.name}: {self._failure}")
        if self._failure:
            return UnavailableError(f"{self.name} failed: {self._failure}")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
        return UnavailableError(f"the process of {self.name} {how}")


def _start(
    rank: int, rendezvous: str, memory: int | None, pipes: Iterable[Connection]
) -> subprocess.Popen[bytes]:
    shared = () if memory is None else (memory,)
    handles = (*(pipe.fileno() for pipe in pipes), *shared)
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "hippo.parallel.follower"),
            *(str(rank), rendezvous),
            *map(str, handles),
        ],
        stdin=subprocess.PIPE,  # closes when this process ends
        pass_fds=handles,
        env=importing_environment(),
    )
