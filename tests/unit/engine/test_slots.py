"""Which slot a sequence takes, and who waits for one."""

import asyncio
import random

import pytest
import torch

from hippo.engine.slots import Reservation, SlotPool
from hippo.errors import OverloadedError
from hippo.models.interface.content import CachedRows


def text(*ids: int) -> CachedRows:
    """Rows of plain text."""
    length = len(ids)
    no_item = torch.full((length,), -1)
    table = torch.stack((torch.tensor(ids), no_item, no_item, torch.arange(length)))
    return CachedRows("", table, ())


def use(pool: SlotPool, rows: CachedRows) -> tuple[Reservation, int, int]:
    """Takes a slot: the claim, the slot's index, and the rows that it holds."""
    reservation = pool.reserve_slot()
    index, held = reservation.take_slot(rows)
    return reservation, index, len(held)


def pool_of(*contents: CachedRows) -> SlotPool:
    """Free slots with these contents, slot 0's the least recently used."""
    pool = SlotPool(len(contents), max_waiting=0)
    claims = [use(pool, content)[0] for content in contents]
    for claim, content in zip(claims, contents, strict=True):
        claim.release(content)
    return pool


LONG = (1, 2, *range(10, 30))


@pytest.mark.parametrize(
    ("contents", "asked", "expected"),
    [
        ([(1, 2, 9, 9), (1, 2, 3, 9), (1, 9, 9, 9)], (1, 2, 3, 4), 1),  # the longest beginning
        ([(5, 5), (1, 2), (1, 2)], (1, 2, 3), 1),  # of equal ones the least recently used
        ([(), LONG], (1, 2, 3), 0),  # what is little of LONG does not cost the rest of it
        ([(), LONG], LONG[:12], 1),
    ],
)
def test_the_free_slot_with_the_longest_common_beginning_is_taken(
    contents: list[tuple[int, ...]], asked: tuple[int, ...], expected: int
) -> None:
    _, index, num_held = use(pool_of(*(text(*ids) for ids in contents)), text(*asked))
    assert (index, num_held) == (expected, len(contents[expected]))


def test_without_a_common_beginning_the_least_recently_used_slot_is_taken() -> None:
    pool = pool_of(text(1), text(2), text(3))
    claim, index, _ = use(pool, text(7, 7))
    assert index == 0
    claim.release(text(7, 7))
    assert [use(pool, text(8))[1] for _ in range(3)] == [1, 2, 0]


def test_a_free_slot_goes_to_the_client_with_the_fewest() -> None:
    pool = SlotPool(3, max_waiting=9)
    held = [pool.reserve_slot(client="mallory") for _ in range(3)]
    line = [pool.reserve_slot(client=name) for name in ("mallory", "mallory", "alice", "bob")]

    def release(reservation: Reservation) -> list[bool]:
        reservation.release()
        return [each.is_granted for each in line]

    assert release(held[0]) == [False, False, True, False]
    assert release(held[1]) == [False, False, True, True]
    assert release(line[2]) == [True, False, True, True]  # all have one: the first that came
    late = pool.reserve_slot(client="bob")
    assert release(line[3]) == [True, False, True, True] and late.is_granted
    assert release(late) == [True, True, True, True]


def test_who_must_not_wait_gets_a_slot_or_is_refused() -> None:
    pool = SlotPool(1, max_waiting=1)
    assert pool.reserve_slot(may_wait=False).is_granted
    with pytest.raises(OverloadedError, match="all 1 slots"):
        pool.reserve_slot(may_wait=False)
    assert not pool.reserve_slot().is_granted


def test_the_queue_is_full_when_its_media_take_too_many_bytes() -> None:
    pool = SlotPool(1, max_waiting=9, max_waiting_bytes=100)
    running, waiting = pool.reserve_slot(100), pool.reserve_slot(60)
    with pytest.raises(OverloadedError, match="all 1 slots are taken, and 1 of 9 places"):
        pool.reserve_slot(41)
    assert not pool.reserve_slot(40).is_granted
    running.release()
    assert waiting.is_granted
    assert not pool.reserve_slot(60).is_granted


async def test_waiting_ends_with_the_grant_or_with_the_release_whichever_is_first() -> None:
    pool = SlotPool(1, max_waiting=2)
    holder, next_one, gone = pool.reserve_slot(), pool.reserve_slot(), pool.reserve_slot()
    waiting = asyncio.create_task(gone.wait_granted())
    await asyncio.sleep(0)
    gone.release()
    assert await waiting is False
    holder.release()
    assert await next_one.wait_granted() is True


async def test_the_first_in_the_queue_are_near_and_the_others_follow_as_it_moves_on() -> None:
    pool = SlotPool(1, max_waiting=4, num_near=2)
    claims = [pool.reserve_slot() for _ in range(5)]
    assert [claim.is_near.is_set() for claim in claims] == [True, True, True, False, False]
    claims[1].release()
    assert [claim.is_near.is_set() for claim in claims[2:]] == [True, True, False]
    claims[0].release()
    assert claims[2].is_granted
    assert claims[4].is_near.is_set()
    assert await claims[4].wait_near() is True
    assert await claims[1].wait_near() is False


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_claims_and_releases_loses_or_doubles_a_slot(seed: int) -> None:
    chance = random.Random(seed)
    pool = SlotPool(3, max_waiting=2)
    claims: list[Reservation] = []
    for _ in range(400):
        action = chance.random()
        if action < 0.4:
            try:
                claims.append(pool.reserve_slot())
            except OverloadedError:
                assert pool.num_used == 3 and pool.num_waiting == 2
        elif action < 0.7:
            ready = [claim for claim in claims if claim.is_granted and claim.index is None]
            if ready:
                chance.choice(ready).take_slot(text(*(chance.randrange(3) for _ in range(4))))
        elif claims:
            claim = claims.pop(chance.randrange(len(claims)))
            claim.release(text(*(chance.randrange(3) for _ in range(4))))
        granted = [claim for claim in claims if claim.is_granted]
        taken = [claim.index for claim in claims if claim.index is not None]
        assert len(taken) == len(set(taken))
        assert pool.num_used == len(granted)
        assert pool.num_waiting == len(claims) - len(granted)
        assert pool.num_waiting == 0 or pool.num_used == 3
