"""Services whose addresses a name lists: they come, go, and stay while the name cannot be read."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.pairs.discovery import Pool, addresses_of
from hippo.errors import InvalidRequestError
from tests.support.running.services import until


@dataclass
class Listed:
    """A watched service that runs no sequence, unless told so."""

    address: str
    name: str
    num_running: int = 0
    states: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.states.append("started")

    async def close(self) -> None:
        self.states.append("closed")


@asynccontextmanager
async def following(
    monkeypatch: pytest.MonkeyPatch, found: list[str] | Exception, *, make: Any = Listed
) -> AsyncIterator[tuple[Pool[Any], list[Any]]]:
    """A pool of one fixed service and a name, and what the name gives now."""
    answers: list[Any] = [found]

    def look_up(name: str) -> list[str]:
        assert name == "pairs:1"
        if isinstance(answers[0], Exception):
            raise answers[0]
        return list(answers[0])

    monkeypatch.setattr("gateway.pairs.discovery.addresses_of", look_up)
    monkeypatch.setattr("gateway.pairs.discovery._LEAVING_S", 0.01)
    pool: Pool[Any] = Pool(["fixed:1", "dns+pairs:1"], make, lambda: None, period_s=0.005)
    pool.start()
    try:
        yield pool, answers
    finally:
        await pool.close()


async def test_services_come_and_go_and_a_running_sequence_keeps_one_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with following(monkeypatch, ["a:1", "b:1"]) as (pool, answers):
        await until(lambda: len(pool.services) == 3)
        fixed, a, b = pool.services
        assert [fixed.address, a.address, b.address] == ["fixed:1", "a:1", "b:1"]
        assert [fixed.name, a.name] == ["", "pairs"]
        a.num_running = 1
        answers[0] = ["b:1", "c:1"]
        await until(lambda: [each.address for each in pool.services] == ["fixed:1", "b:1", "c:1"])
        assert pool.services[1] is b
        await asyncio.sleep(0.03)
        assert a.states == ["started"]
        a.num_running = 0
        await until(lambda: a.states == ["started", "closed"])
    assert b.states == fixed.states == ["started", "closed"]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no address: Name or"),
        (UnicodeError("label too long"), "no address: label"),
        (RuntimeError("surprise"), "cannot be used: surprise"),
    ],
    ids=["none", "long", "surprise"],
)
async def test_while_a_name_cannot_be_looked_up_its_services_stay(
    failure: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following(monkeypatch, failure) as (pool, answers):
        await until(lambda: words in pool.problems[0])
        answers[0] = ["a:1"]
        await until(lambda: len(pool.services) == 2)
        assert pool.problems == []
        answers[0] = failure
        await until(lambda: len(caplog.records) == 2)
        await asyncio.sleep(0.02)
        assert len(pool.services) == 2 and len(caplog.records) == 2


async def test_a_service_that_cannot_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ["b:1"]

    def make(address: str, name: str) -> Listed:
        if address in missing:
            raise InvalidRequestError("TLS file ca.pem: No such file or directory")
        return Listed(address, name)

    async with following(monkeypatch, ["a:1", "b:1"], make=make) as (pool, answers):
        await until(lambda: "pairs:1 lists cannot be used: TLS file" in pool.problems[0])
        answers[0] = ["a:1"]
        await until(lambda: len(pool.services) == 2)
        answers[0] = ["a:1", "b:1"]
        missing.clear()
        await until(lambda: len(pool.services) == 3)
        assert pool.problems == []
        assert all(each.states == ["started"] for each in pool.services)


def test_a_name_is_looked_up_in_one_family() -> None:
    [address] = addresses_of("localhost:50052")
    assert address in ("127.0.0.1:50052", "[::1]:50052")
