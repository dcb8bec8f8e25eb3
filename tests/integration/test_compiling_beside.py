"""A service whose layers are not compiled yet serves at once, and runs them compiled later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from hippo.rpc.client import TargetClient
from hippo.types import ChatMessage, TextPart
from tests.support.services import target_only, toy_request

ROOT = Path(__file__).parents[2]
COMPILED = "steps of one sequence are compiled now"
NOT_COMPILED = "steps are not compiled"

pytestmark = pytest.mark.timeout(500)  # a compiler runs at a low priority


class Service:
    """A target service and its log."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.child = child
        self._folder = folder
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        port_file = self._folder / "port"
        self.await_that(port_file.exists)
        return int(port_file.read_text())

    def await_that(self, holds: Callable[[], bool], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.child.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def compiling(self) -> list[int]:
        """The processes that compile for it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self._folder).encode() in (command := path.read_bytes()):
                    found += [int(path.parent.name)] if b"compile_apart" in command else []
        return found


@pytest.fixture
def start(target_checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts the service on the small target, with layers compiled beside the steps."""
    with contextlib.ExitStack() as ending:

        def started(**env: str) -> Service:
            flags = ("--model", str(target_checkpoint), "--dtype", "float32", "--slots", "2")
            kept = ("--compile", "auto", "--compile-cache", str(tmp_path / "kept"))
            where = ("--port", "0", "--port-file", str(tmp_path / "port"))
            log = tmp_path / "log"
            with log.open("w") as sink:
                child = subprocess.Popen(
                    [sys.executable, "-m", "services.target", *flags, *kept, *where],
                    cwd=ROOT,
                    stderr=sink,
                    env={**os.environ, **env},
                )
            ending.callback(child.wait)
            ending.callback(child.kill)
            return Service(child, tmp_path, log)

        yield started


@contextlib.asynccontextmanager
async def _serving(started: Service) -> AsyncIterator[TargetClient]:
    client = TargetClient(f"127.0.0.1:{started.port}")
    try:
        await client.wait_ready(120)
        yield client
    finally:
        await client.close()


async def _answer(client: TargetClient) -> list[int]:
    words = ChatMessage("user", (TextPart("what happens in the thing"),))
    request = toy_request(media=(), messages=(words,), max_tokens=120, end_token_ids=())
    return (await target_only(client, request)).token_ids


@pytest.mark.usefixtures("compile_folder")  # skips where there is no compiler
async def test_it_serves_before_and_the_tokens_are_the_same_while_and_after(
    start: Callable[..., Service],
) -> None:
    service = start()
    async with _serving(service) as client:
        answers = [await _answer(client)]
        assert COMPILED not in service.log and service.compiling()
        deadline = time.monotonic() + 300
        while COMPILED not in service.log:
            assert NOT_COMPILED not in service.log and time.monotonic() < deadline, service.log
            answers.append(await _answer(client))
        answers.append(await _answer(client))
    assert len(answers[0]) == 120
    assert all(answer == answers[0] for answer in answers)
    assert not service.compiling()


async def test_a_compiler_that_fails_costs_nothing_but_a_line_in_the_log(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    compiler = tmp_path / "failing" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    service = start(PATH=f"{compiler.parent}:{os.environ['PATH']}", CXX=str(compiler))
    async with _serving(service) as client:
        service.await_that(lambda: NOT_COMPILED in service.log)
        assert await _answer(client)
    assert "Traceback" not in service.log and " warning " not in service.log
    assert not service.compiling()


def _group(group_id: int) -> list[str]:
    """The programs of a process group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, group = rest.split()[:3]
            if int(group) == group_id and state != "Z":
                found.append(name.partition("(")[2])
    return found


@pytest.mark.usefixtures("compile_folder")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_compiling_ends_with_the_service(
    start: Callable[..., Service], number: signal.Signals
) -> None:
    service = start()
    async with _serving(service):
        service.await_that(lambda: bool(service.compiling()))
        (compiling,) = service.compiling()
        service.await_that(lambda: "cc1plus" in _group(compiling))
    service.child.send_signal(number)
    assert service.child.wait(30) == (0 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 10
    while _group(compiling):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert "Traceback" not in service.log


@pytest.mark.usefixtures("compile_folder")
async def test_compiling_that_is_killed_costs_nothing_but_a_line_in_the_log(
    start: Callable[..., Service],
) -> None:
    service = start()
    async with _serving(service) as client:
        service.await_that(lambda: bool(service.compiling()))
        os.kill(service.compiling()[0], signal.SIGKILL)
        service.await_that(lambda: NOT_COMPILED in service.log)
        assert await _answer(client)
    assert "was ended by SIGKILL" in service.log and "Traceback" not in service.log
