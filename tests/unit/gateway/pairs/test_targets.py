"""Which services a name lists, the order in which they are asked, and what a refusal leads to."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pairs.discovery import Pool, addresses_of
from gateway.pairs.targets import Pair, by_rank, follow_first
from gateway.pairs.watch import Watch
from hippo.errors import (
    HippoError,
    InvalidRequestError,
    MediaPathError,
    OverloadedError,
    UnavailableError,
)
from tests.support.running.info import small_model_info
from tests.support.running.services import until


def _service(address: str, num_running: int = 0) -> Any:
    """A service with four slots that nobody asks for its health."""
    watch: Any = Watch("target", Mock(address=address), on_change=lambda: None)
    watch.info, watch.num_running = replace(small_model_info(), num_slots=4), num_running
    return watch


def _choose(services: Sequence[Any], key: bytes, host: str = "elsewhere") -> Any:
    target: Any = SimpleNamespace(fitting_drafts=services, host=host)
    return Pair(target, key).draft


def test_one_clip_stays_where_it_was_until_that_is_full() -> None:
    services = [_service(f"target:{i}") for i in range(3)]
    first = _choose(services, b"a clip")
    for _ in range(4):
        assert _choose(services, b"a clip") is first
        first.num_running += 1
    assert _choose(services, b"a clip") is not first


def test_a_draft_on_the_targets_host_is_preferred_while_it_has_a_slot() -> None:
    near, far = drafts = [_service("near:1"), _service("far:1")]
    keys = [str(number).encode() for number in range(20)]
    assert {_choose(drafts, key, "near") for key in keys} == {near}
    near.report_refusal()
    assert {_choose(drafts, key, "near") for key in keys} == {far}


def test_all_gateways_prefer_the_same_service_in_whatever_order_they_found_them() -> None:
    services = [_service(f"target:{i}") for i in range(5)]
    shuffled = [services[i] for i in (3, 0, 4, 2, 1)]
    assert by_rank(shuffled, b"a clip") == by_rank(services, b"a clip")


def test_clips_are_spread_and_move_little_when_a_service_comes() -> None:
    services = [_service(f"target:{i}") for i in range(4)]
    keys = [str(number).encode() for number in range(400)]
    before = {key: _choose(services[:3], key) for key in keys}
    after = {key: _choose(services, key) for key in keys}
    assert all(after[key] in (before[key], services[3]) for key in keys)
    assert min(Counter(each.address for each in after.values()).values()) > 50


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 12), min_size=2, max_size=6), key=st.binary(max_size=4))
def test_nobody_waits_while_another_has_a_slot_free(loads: list[int], key: bytes) -> None:
    services = [_service(f"target:{i}", number) for i, number in enumerate(loads)]
    chosen = _choose(services, key)
    assert chosen.load < 1 or all(service.load >= chosen.load for service in services)


def _offered(address: str, *answers: HippoError | None) -> Any:
    """A target that answers an offer with an error, or takes it."""
    target = _service(address)
    target.answers = list(answers)
    return target


async def _offer(*targets: Any, has_begun: bool = False) -> str:
    """The target that takes a sequence."""
    pairs = [Pair(target, b"") for target in targets]
    taken: list[str] = []

    async def follow(pair: Any) -> None:
        if (error := pair.target.answers.pop(0)) is not None:
            raise error
        taken.append(pair.target.address)

    async def fall_back(_: MediaPathError) -> None:
        return None

    await follow_first(pairs, follow, fall_back, lambda: has_begun)
    [address] = taken
    return address


async def test_a_sequence_goes_to_the_first_target_that_takes_it() -> None:
    full = _offered("full", OverloadedError("all slots are taken"))
    stopping = _offered("stopping", UnavailableError("the service is shutting down"))
    down = _offered("down")
    down.report_failure()
    last = _offered("last", MediaPathError("not here"), None)
    assert await _offer(full, stopping, down, last) == "last"
    assert [each.is_full for each in (full, stopping, last)] == [True, False, False]
    assert "just failed" in stopping.problem and full.info is not None
    assert not any(each.num_running for each in (full, stopping, last))


async def test_errors_that_another_target_would_not_mend_are_raised() -> None:
    other = _offered("other", None)
    with pytest.raises(InvalidRequestError):
        await _offer(_offered("one", InvalidRequestError("wrong")), other)
    with pytest.raises(UnavailableError, match="gone"):
        await _offer(_offered("one", UnavailableError("gone")), other, has_begun=True)
    full = [_offered(name, OverloadedError(name)) for name in ("one", "the last")]
    with pytest.raises(OverloadedError, match="the last"):
        await _offer(*full)


def test_the_selection_has_room_in_whichever_draft_takes_it() -> None:
    def told(*drafts: tuple[int, int] | None) -> int:
        """``drafts`` are their contexts and what they cache; None: it is down."""
        infos = (
            each and replace(small_model_info(), max_context_length=each[0], cache_tokens=each[1])
            for each in drafts
        )
        target: Any = SimpleNamespace(fitting_drafts=[SimpleNamespace(info=info) for info in infos])
        return Pair(target, b"").draft_cache_tokens

    assert told() == 0
    assert told((4096, 1536), (8192, 2663)) == 1536
    assert told((8192, 2663), (2048, 0)) == 2048, "of an older release: all is cached"
    assert told(None, (8192, 2663)) == 2663


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
