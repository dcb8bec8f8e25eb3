"""A target on two ranks as an operator runs it: its output, its failures and its ends."""

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hippo.errors import UnavailableError
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.rpc.client import TargetClient
from tests.support.devices.parallel import followers_of
from tests.support.running.services import ready_client, serving_target, target_only, text_request
from tests.support.running.zygote import ForkedProcess, Zygote

TEXT = text_request(max_tokens=24, end_token_ids=())


@pytest.fixture
def cores() -> list[int]:
    return psutil.Process().cpu_affinity()


@pytest.fixture
def child(
    zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
    target_checkpoint: Path,
    tmp_path: Path,
    cores: list[int],
) -> Iterator[ForkedProcess]:
    """A target whose port goes into a file; followers are processes of their own, rank 0 is
    forked."""
    if torch.accelerator.is_available():
        pytest.skip("ranks on the CPU need the accelerator hidden: CUDA_VISIBLE_DEVICES=")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    arguments = (
        *("--model", str(target_checkpoint), "--port", "0", "--port-file", f"{tmp_path}/port"),
        *("--tensor-parallel", "2", "--num-threads", "1", "--dtype", "float32"),
        *("--slots", "1", "--max-context-length", "512"),
        *("--cpu-cores", f"{cores[0]},{cores[-1]}"),
    )
    child = zygote.start("services.target", arguments)
    try:
        yield child
        child.communicate(timeout=60)
        assert list(tmp_path.glob("hippo-ranks-*")) == []
    finally:
        child.kill()
        child.communicate()


def _wait(condition: Callable[[], Any]) -> Any:
    """What becomes true; the test's timeout ends it."""
    while not (value := condition()):
        time.sleep(0.02)
    return value


def _port(folder: Path) -> int:
    _wait((folder / "port").exists)
    return int((folder / "port").read_text())


def _follower(child: ForkedProcess) -> psutil.Process:
    (follower,) = _wait(lambda: followers_of(child.pid))
    assert isinstance(follower, psutil.Process)
    return follower


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_service_on_two_ranks_serves_one_ranks_output_and_stops_in_good_order(
    target_checkpoint: Path, tmp_path: Path, child: ForkedProcess, cores: list[int]
) -> None:
    async def expected() -> list[int]:
        model = load_model(
            LoadPlan(str(target_checkpoint), dtype="float32", max_context_length=512)
        )
        async with serving_target(model) as (_, client):
            return (await target_only(client, TEXT)).token_ids

    async def use(port: int) -> list[int]:
        async with ready_client(TargetClient, port) as client:
            return (await target_only(client, TEXT)).token_ids

    ids = asyncio.run(use(_port(tmp_path)))
    follower = _follower(child)
    assert follower.cpu_affinity() == [cores[-1]]
    child.send_signal(signal.SIGTERM)
    _, log = child.communicate(timeout=60)
    assert child.returncode == 0, log
    assert _has_ended(follower)
    assert ids == asyncio.run(expected())
    assert "rank 1: loading: 100 %" in log
    assert "stopped" in log
    assert "Traceback" not in log and "Fatal" not in log


def test_a_follower_that_is_killed_ends_the_service_with_a_clear_message(
    tmp_path: Path, child: ForkedProcess
) -> None:
    endless = dataclasses.replace(TEXT, max_tokens=450)

    async def use() -> None:
        async with ready_client(TargetClient, _port(tmp_path)) as client:
            with pytest.raises(UnavailableError):
                async with client.verify(endless) as stream:
                    await anext(aiter(stream))
                    _follower(child).kill()
                    async for _ in stream:
                        pass

    asyncio.run(use())
    _, log = child.communicate(timeout=60)
    assert child.returncode == 1, log
    assert "the process of rank 1 was ended by SIGKILL" in log


def test_followers_end_when_rank_0_ends_for_whatever_reason(child: ForkedProcess) -> None:
    follower = _follower(child)
    child.kill()
    _wait(lambda: _has_ended(follower))


@pytest.mark.parametrize("is_stopped", [True, False], ids=["SIGTERM", "a follower that ends"])
def test_an_end_while_the_ranks_load_leaves_no_process_behind(
    is_stopped: bool, child: ForkedProcess
) -> None:
    follower = _follower(child)
    if is_stopped:
        child.send_signal(signal.SIGTERM)
    else:
        follower.kill()
    _, log = child.communicate(timeout=60)
    assert child.returncode == (0 if is_stopped else 1), log
    assert _has_ended(follower)
    assert is_stopped or "the process of rank 1 was ended by SIGKILL" in log
    assert "Traceback" not in log
