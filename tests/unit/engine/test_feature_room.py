"""Which sequences of a draft may run their vision tower before their selection has come."""

from collections.abc import Callable

import pytest

from services.draft.room import FeatureRoom

Enter = Callable[[str, int], None]


@pytest.fixture
def room() -> FeatureRoom:
    return FeatureRoom()


@pytest.fixture
def begun() -> list[str]:
    return []


@pytest.fixture
def enter(room: FeatureRoom, begun: list[str]) -> Enter:
    def enter(owner: str, num_tokens: int) -> None:
        room.enter(owner, num_tokens, lambda: begun.append(owner), capacity=100)

    return enter


def test_owners_enter_while_their_features_fit(enter: Enter, begun: list[str]) -> None:
    enter("a", 60)
    enter("b", 40)
    enter("text only", 0)
    enter("c", 1)
    assert begun == ["a", "b", "text only"]


def test_nobody_overtakes_one_who_waits(enter: Enter, begun: list[str], room: FeatureRoom) -> None:
    enter("a", 60)
    enter("long", 80)
    enter("short", 10)
    assert begun == ["a"]
    room.leave("a")
    assert begun == ["a", "long", "short"]


def test_who_has_a_selection_or_is_closed_waits_no_more(
    enter: Enter, begun: list[str], room: FeatureRoom
) -> None:
    enter("a", 100)
    for owner in ("selected", "closed", "last"):
        enter(owner, 50)
    assert room.skip_queue("selected")
    assert not room.skip_queue("selected")
    assert not room.skip_queue("a")  # its tower runs, and its features still count
    room.leave("closed")
    room.leave("unknown")
    assert begun == ["a"]
    room.leave("a")
    assert begun == ["a", "last"]
