"""The order in which services are asked, and what a refusal leads to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
