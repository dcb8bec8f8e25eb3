"""The order in which services are asked, and what a refusal leads to."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pairs.targets import Pair, by_rank, follow_first
from hippo.errors import (
    HippoError,
    InvalidRequestError,
    MediaPathError,
    OverloadedError,
    UnavailableError,
)
from tests.support.running.info import small_model_info


@dataclass(eq=False)
class _Service:
    address: str
    num_slots: int = 4
    num_running: int = 0
    host: str = ""

    @property
    def load(self) -> float:
        return self.num_running / self.num_slots

    @property
    def is_full(self) -> bool:
        return self.load >= 1


def _choose(services: Sequence[_Service], key: bytes) -> _Service:
    target: Any = SimpleNamespace(fitting_drafts=services, host="elsewhere")
    chosen: Any = Pair(target, key).draft
    assert isinstance(chosen, _Service)
    return chosen


def test_one_clip_stays_where_it_was_until_that_is_full() -> None:
    services = [_Service(f"target:{i}") for i in range(3)]
    first = _choose(services, b"a clip")
    for _ in range(first.num_slots):
        assert _choose(services, b"a clip") is first
        first.num_running += 1
    assert _choose(services, b"a clip") is not first


def test_a_draft_on_the_targets_host_is_preferred_while_it_has_a_slot() -> None:
    near, far = drafts = [_Service(f"{host}:1", host=host) for host in ("near", "far")]
    target: Any = SimpleNamespace(fitting_drafts=drafts, host="near")
    pairs: list[Any] = [Pair(target, str(number).encode()) for number in range(20)]
    assert {pair.draft for pair in pairs} == {near}
    near.num_running = near.num_slots
    assert {pair.draft for pair in pairs} == {far}


def test_all_gateways_prefer_the_same_service_in_whatever_order_they_found_them() -> None:
    services: list[Any] = [_Service(f"target:{i}") for i in range(5)]
    shuffled = [services[i] for i in (3, 0, 4, 2, 1)]
    assert by_rank(shuffled, b"a clip") == by_rank(services, b"a clip")


def test_clips_are_spread_and_move_little_when_a_service_comes() -> None:
    services = [_Service(f"target:{i}") for i in range(4)]
    keys = [str(number).encode() for number in range(400)]
    before = {key: _choose(services[:3], key) for key in keys}
    after = {key: _choose(services, key) for key in keys}
    assert all(after[key] in (before[key], services[3]) for key in keys)
    assert min(Counter(each.address for each in after.values()).values()) > 50


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 12), min_size=2, max_size=6), key=st.binary(max_size=4))
def test_nobody_waits_while_another_has_a_slot_free(loads: list[int], key: bytes) -> None:
    services = [_Service(f"target:{i}", num_running=n) for i, n in enumerate(loads)]
    chosen = _choose(services, key)
    assert chosen.load < 1 or all(service.load >= chosen.load for service in services)


class _Offered(_Service):
    """A target that answers an offer with an error, or takes it."""

    def __init__(self, address: str, *answers: HippoError | None, is_up: bool = True) -> None:
        super().__init__(address)
        self.answers = list(answers)
        self.info = is_up or None
        self.reports: list[str] = []

    def report_refusal(self) -> None:
        self.reports.append("refused")

    def report_failure(self) -> None:
        self.reports.append("failed")

    @contextlib.contextmanager
    def count_sequence(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


async def _offer(*targets: _Offered, has_begun: bool = False) -> str:
    """The target that takes a sequence."""
    pairs: list[Any] = [Pair(target, b"") for target in targets]  # type: ignore[arg-type]
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
    full = _Offered("full", OverloadedError("all slots are taken"))
    stopping = _Offered("stopping", UnavailableError("the service is shutting down"))
    down = _Offered("down", is_up=False)
    last = _Offered("last", MediaPathError("not here"), None)
    assert await _offer(full, stopping, down, last) == "last"
    assert (full.reports, stopping.reports, down.reports) == (["refused"], ["failed"], [])
    assert not any(each.num_running for each in (full, stopping))


async def test_errors_that_another_target_would_not_mend_are_raised() -> None:
    other = _Offered("other", None)
    with pytest.raises(InvalidRequestError):
        await _offer(_Offered("one", InvalidRequestError("wrong")), other)
    with pytest.raises(UnavailableError, match="gone"):
        await _offer(_Offered("one", UnavailableError("gone")), other, has_begun=True)
    with pytest.raises(OverloadedError, match="the last"):
        await _offer(
            _Offered("one", OverloadedError("one")), _Offered("two", OverloadedError("the last"))
        )


def test_the_selection_has_room_in_whichever_draft_takes_it() -> None:
    def draft(max_context_length: int, cache_tokens: int) -> Any:
        info = replace(
            small_model_info(), max_context_length=max_context_length, cache_tokens=cache_tokens
        )
        return SimpleNamespace(info=info)

    def told(*drafts: Any) -> int:
        target: Any = SimpleNamespace(fitting_drafts=list(drafts))
        return Pair(target, b"").draft_cache_tokens

    assert told() == 0
    assert told(draft(4096, 1536), draft(8192, 2663)) == 1536
    assert told(draft(8192, 2663), draft(2048, 0)) == 2048, "of an older release: all is cached"
    assert told(SimpleNamespace(info=None), draft(8192, 2663)) == 2663
