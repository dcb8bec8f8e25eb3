"""Which client's item is decoded next."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from hippo.video.seats import Turns


@pytest.fixture(autouse=True)
async def no_task_outlives_its_loop() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class Queue:
    """Items that wait for their turns; each keeps its seat until it is told to end."""

    def __init__(self, num_seats: int) -> None:
        self.turns = Turns(num_seats)
        self.at_work: dict[str, int] = {}  # seat by item
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *items: str, is_expensive: bool = False) -> None:
        """An item's first letter is its client."""
        for item in items:
            self._ends[item] = asyncio.Event()
            self._tasks[item] = asyncio.create_task(self._work(item, is_expensive))
            await asyncio.sleep(0)

    async def end(self, item: str) -> None:
        self._ends[item].set()
        await self._tasks[item]
        for _ in range(3):
            await asyncio.sleep(0)

    async def cancel(self, item: str) -> None:
        self._tasks[item].cancel()
        await asyncio.gather(self._tasks[item], return_exceptions=True)
        await asyncio.sleep(0)

    async def order(self) -> str:
        """The items in the order in which they come to work on one seat."""
        found = []
        while self.at_work:
            (item,) = self.at_work
            found.append(item)
            await self.end(item)
        return " ".join(found)

    async def _work(self, item: str, is_expensive: bool) -> None:
        async with self.turns.turn(item[0], is_expensive=is_expensive) as seat:
            self.at_work[item] = seat
            try:
                await self._ends[item].wait()
            finally:
                del self.at_work[item]


@pytest.mark.parametrize(
    ("first", "then", "order"),
    [
        ("a1 a2 a3 a4 b1 b2 c1", [], "a1 a2 b1 c1 a3 b2 a4"),
        ("a1 a2 b1", ["end a1", "add c1"], "a2 b1 c1"),  # who comes back at once starves nobody
        ("a1 b1 b2 c1", ["cancel b1", "cancel a1"], "b2 c1"),
        ("a1 b1", ["cancel b1", "end a1", "add a2"], "a2"),
    ],
)
async def test_clients_take_turns(first: str, then: list[str], order: str) -> None:
    queue = Queue(1)
    await queue.add(*first.split())
    for step in then:
        name, item = step.split()
        await getattr(queue, name)(item)
    assert await queue.order() == order


async def test_one_item_of_a_client_at_a_time_while_others_wait() -> None:
    queue = Queue(3)
    await queue.add("a1", "a2", "a3", "a4", "a5", "b1", "c1")
    assert queue.at_work == {"a1": 0, "a2": 2, "b1": 1}
    await queue.end("a1")
    await queue.end("a2")
    assert queue.at_work == {"b1": 1, "c1": 0, "a3": 2}
    await queue.end("b1")
    assert queue.at_work == {"c1": 0, "a3": 2}  # a has one at work


async def test_a_client_leaves_others_a_place_for_any_item() -> None:
    queue = Queue(3)
    await queue.add("a1", "a2", "a3", is_expensive=True)
    assert queue.at_work == {"a1": 0}
    await queue.add("b1", is_expensive=True)
    assert queue.at_work == {"a1": 0, "b1": 1}
    await queue.end("a1")
    assert queue.at_work == {"b1": 1, "a3": 0}


async def test_the_last_seat_is_kept_for_cheap_items() -> None:
    queue = Queue(2)
    await queue.add("a1")
    await queue.add("a2", "b1", is_expensive=True)
    assert queue.at_work == {"a1": 0}
    assert queue.turns.is_reserved(1) and not queue.turns.is_reserved(0)
    await queue.add("c1")
    assert queue.at_work == {"a1": 0, "c1": 1}
    await queue.end("c1")
    assert queue.at_work == {"a1": 0}
    await queue.end("a1")
    assert queue.at_work == {"b1": 0}  # came back the last, so as the next
    assert not Turns(1).is_reserved(0)


async def test_an_item_cancelled_as_its_turn_comes_gives_the_seat_on() -> None:
    queue = Queue(1)
    await queue.add("a1", "b1", "c1")
    queue._ends["a1"].set()
    while "a1" in queue.at_work:
        await asyncio.sleep(0)
    await queue.cancel("b1")
    assert await queue.order() == "c1"
