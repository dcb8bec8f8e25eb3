"""The services as an operator runs them: flags, port file, signals, exit codes, messages."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hippo.errors import HippoError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import Pace
from tests.support.running.services import ready_client, target_only, text_request
from tests.support.running.zygote import ForkedProcess, Zygote


@contextmanager
def ended(child: ForkedProcess) -> Iterator[ForkedProcess]:
    """Kills the process at the end if it still runs."""
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def end_of(child: ForkedProcess, returncode: int) -> str:
    """Its log, once it has ended so."""
    _, log = child.communicate(timeout=60)
    assert child.returncode == returncode, log
    return log


def _port(child: ForkedProcess, port_file: Path) -> int:
    while not port_file.exists():
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    return int(port_file.read_text())


@pytest.fixture
def flags(target_checkpoint: Path, tmp_path: Path) -> tuple[str, ...]:
    return ("--model", str(target_checkpoint), "--port", "0", "--port-file", f"{tmp_path}/port")


@pytest.mark.parametrize("service", ["draft", "target"])
def test_a_service_starts_serves_and_stops_in_good_order_on_sigterm(
    service: str, flags: tuple[str, ...], tmp_path: Path, zygote: Zygote
) -> None:
    core = max(os.sched_getaffinity(0))
    small = ("--slots", "1", "--max-context-length", "256")
    arguments = (*flags, *small, "--served-name", "tiny", "--cpu-core", str(core))
    with ended(zygote.start(f"services.{service}", arguments)) as child:
        port = _port(child, tmp_path / "port")

        async def use() -> None:
            make: Any = DraftClient if service == "draft" else TargetClient
            async with ready_client(make, port) as client:
                info = await client.get_model()
                assert (info.name, info.num_slots, info.max_context_length) == ("tiny", 1, 256)
                threads = Path(f"/proc/{child.pid}/task").iterdir()
                assert {frozenset(os.sched_getaffinity(int(t.name))) for t in threads} == {
                    frozenset({core})
                }
                if isinstance(client, TargetClient):
                    assert (await target_only(client, text_request(max_tokens=5))).token_ids

        asyncio.run(use())
        child.send_signal(signal.SIGTERM)
        log = end_of(child, 0)
    assert f"listening on 127.0.0.1:{port}" in log
    assert "stopped" in log
    assert "Traceback" not in log


def test_sigint_while_the_model_loads_ends_the_service(
    flags: tuple[str, ...], tmp_path: Path, zygote: Zygote
) -> None:
    with ended(zygote.start("services.draft", flags)) as child:
        _port(child, tmp_path / "port")
        child.send_signal(signal.SIGINT)
        assert "Traceback" not in end_of(child, 0)


def test_a_missing_model_is_one_clear_line(tmp_path: Path, zygote: Zygote) -> None:
    flags = ("--model", str(tmp_path / "nothing"), "--port", "0")
    with ended(zygote.start("services.draft", flags)) as child:
        log = end_of(child, 1)
    assert str(tmp_path / "nothing") in log
    assert "Traceback" not in log
    assert len([line for line in log.splitlines() if " error " in line]) == 1


def test_a_device_that_fails_ends_the_service_when_its_answers_have_got_the_error(
    flags: tuple[str, ...], tmp_path: Path, zygote: Zygote
) -> None:
    small = ("--slots", "2", "--max-context-length", "512", "--num-threads", "1")
    failure_file = tmp_path / "failed"
    request = text_request(max_tokens=400, end_token_ids=(), pace=Pace(max_ahead=1))

    async def verify(client: TargetClient, begun: asyncio.Semaphore) -> None:
        async with client.verify(request) as stream:
            async for _ in stream:
                begun.release()

    async def use(port: int) -> list[str]:
        async with ready_client(TargetClient, port) as client:
            begun = [asyncio.Semaphore(0), asyncio.Semaphore(0)]
            answers = [asyncio.create_task(verify(client, one)) for one in begun]
            for one in begun:
                await one.acquire()
            failure_file.touch()
            ends = await asyncio.gather(*answers, return_exceptions=True)
            assert all(isinstance(end, HippoError) for end in ends), ends
            return [str(end) for end in ends]

    arguments = (str(failure_file), *flags, *small)
    with ended(zygote.start("tests.support.running.failing_service", arguments)) as child:
        ends = asyncio.run(use(_port(child, tmp_path / "port")))
        log = end_of(child, 1)
    for end in ends:
        assert "failed inside the service" in end or "the service's device has failed" in end
    assert log.count("the device failed: CUDA error: an illegal memory access") == 1
