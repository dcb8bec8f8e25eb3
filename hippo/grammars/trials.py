"""Tries a client's grammar in a process that is killed if the grammar costs too much.

A grammar that is not compiled in ``QUICK_CPU_S`` is tried again with the whole ``MAX_CPU_S``, one
at a time, so that no ordinary grammar waits longer for a costly one.
"""

import asyncio
import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor

from hippo.base.worker_process import ForkServer, Message, WorkerDiedError, give_way_here
from hippo.errors import InvalidRequestError, OverloadedError, UnavailableError
from hippo.grammars.limits import MAX_CPU_S, MAX_MEMORY_BYTES, QUICK_CPU_S
from hippo.types import ModelInfo

_NUM_QUICK = 4  # trials at once of less than QUICK_CPU_S
_MAX_KNOWN = 1024  # results kept, of at most a kilobyte: a megabyte
_MAX_WALL_S = 30.0  # limit of a trial, far above its CPU time on the busiest machine


_TOO_COSTLY = (
    f"compiling it takes more than {MAX_CPU_S:g} s of CPU time or {MAX_MEMORY_BYTES >> 20} MiB of "
    "memory; simplify it: fewer alternatives, patterns or properties, a smaller multipleOf"
)


class GrammarTrials:
    """Tries grammars for one tokenizer; the first one starts the process. Must be closed."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        """Without a model, tokens are single bytes: what only a vocabulary costs is not tried."""
        options = tokenizer_options(info) if info is not None else {"tokenizer": "byte"}
        self._server = ForkServer("hippo.grammars.worker", options)
        self._quick = ThreadPoolExecutor(_NUM_QUICK, thread_name_prefix="grammar")
        self._costly = ThreadPoolExecutor(
            1, thread_name_prefix="costly-grammar", initializer=give_way_here
        )
        # Of each grammar's SHA-256, the oldest first: its error, and the threads that compile it.
        self._known: dict[bytes, tuple[str, ThreadPoolExecutor]] = {}

    @property
    def worker_pid(self) -> int | None:
        """Process id of the process that forks; None before the first trial."""
        return self._server.pid

    async def check(self, grammar: str, field: str) -> ThreadPoolExecutor:
        """Tries the grammar of the request's ``field``, unless its result is known. Returns the
        threads that may compile it without delaying cheaper ones. Only for the event loop.

        Raises InvalidRequestError with the field for a grammar that is wrong or too costly,
        OverloadedError if the machine is too busy to tell, UnavailableError if the process cannot
        start.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        known = self._known.pop(key) if key in self._known else None
        error, threads = known or await self._result(grammar)
        self._known[key] = error, threads
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        if error:
            raise InvalidRequestError(f"{field} cannot be used: {error}", param=field)
        return threads

    async def _result(self, grammar: str) -> tuple[str, ThreadPoolExecutor]:
        for threads, cpu_s in ((self._quick, QUICK_CPU_S), (self._costly, MAX_CPU_S)):
            run = asyncio.get_running_loop().run_in_executor
            if (error := await run(threads, self._try, grammar, cpu_s)) is not None:
                return error, threads
        return _TOO_COSTLY, self._costly

    def close(self) -> None:
        """Ends the process; a trial in progress ends by its limits, and its threads after it."""
        self._server.close()
        for threads in (self._quick, self._costly):
            threads.shutdown(wait=True, cancel_futures=True)

    def _try(self, grammar: str, cpu_s: float) -> str | None:
        """Returns the grammar's error, or None if the child was killed; tries again once if there
        is no child."""
        request = {
            "grammar": grammar,
            "cpu_s": cpu_s,
            "wall_s": 2 * _MAX_WALL_S,  # after nobody waits any more
            "max_memory_bytes": MAX_MEMORY_BYTES,
        }
        for _ in range(2):
            child = self._server.fork(timeout_s=_MAX_WALL_S)
            try:
                child.wait_ready()
                with contextlib.suppress(WorkerDiedError):
                    return str(child.ask(request)[0]["error"])
                return None
            except WorkerDiedError:
                self._server.give_up(child)
            except TimeoutError:
                raise OverloadedError(
                    f"this machine is too busy: a grammar was not tried in {_MAX_WALL_S:g} s"
                ) from None
            finally:
                child.kill()
                child.clean_up()
        raise UnavailableError(
            "the process that tries grammars does not start; its log has the details"
        )


def tokenizer_options(info: ModelInfo) -> Message:
    return {
        "tokenizer": info.tokenizer_json.decode(),
        "n_vocab": info.num_token_ids,
        "eos_token": list(info.end_token_ids) or None,
    }
