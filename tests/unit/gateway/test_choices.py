"""Several completions read as one, whatever happens to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
from prometheus_client import Gauge

from gateway.choices import Choices
from gateway.completion import Completion
from gateway.text import Piece, join
from hippo.errors import HippoError, OverloadedError, UnavailableError
from hippo.tasks import cancel_all


class _Completion:
    """Says its words one by one and then ends, fails or says nothing more."""

    def __init__(self, *words: str, error: HippoError | None = None, hangs: bool = False) -> None:
        self._words = words
        self._last_error = error
        self._hangs = hangs
        self._said: list[Piece] = []
        self.news = asyncio.Event()
        self.has_begun = self.is_over = False
        self.error: HippoError | None = None
        self.num_left = 0

    async def __aenter__(self) -> _Completion:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel_all([self._task])
        self.num_left += 1

    async def _run(self) -> None:
        for word in self._words:
            await asyncio.sleep(0)
            self.has_begun = True
            self._said.append(Piece(word))
            self.news.set()
        if not self._hangs:
            self.has_begun |= self._last_error is None
            self.is_over, self.error = True, self._last_error
            self.news.set()

    def take_text(self) -> Piece:
        said, self._said = self._said, []
        return join(said)


class _Gauges:
    """How many wait and run."""

    def __init__(self) -> None:
        self._gauges = [Gauge(name, name, registry=None) for name in ("waiting", "running")]

    def choices(self, *completions: _Completion) -> Choices:
        news = asyncio.Event()
        for completion in completions:
            completion.news = news
        waiting, running = self._gauges
        made = cast(list[Completion], list(completions))
        return Choices(made, news=news, waiting=waiting, running=running)

    def values(self) -> list[float]:
        return [metric.samples[0].value for gauge in self._gauges for metric in gauge.collect()]


def _choices(*completions: _Completion) -> Choices:
    return _Gauges().choices(*completions)


@pytest.mark.parametrize("words", [[("a", "b")], [("a", "b", "c"), (), ("d",)]])
async def test_every_piece_comes_with_its_index_and_every_end_once(
    words: list[tuple[str, ...]],
) -> None:
    texts, ends = [""] * len(words), [0] * len(words)
    async with _choices(*(_Completion(*each) for each in words)) as choices:
        assert await choices.wait_begun()
        async for index, piece in choices.pieces():
            texts[index] += "" if piece is None else piece.text
            ends[index] += piece is None
            assert not ends[index] or piece is None
    assert texts == ["".join(each) for each in words]
    assert ends == [1] * len(words)


@pytest.mark.parametrize("others", [0, 1, 3])
async def test_an_error_of_one_ends_all(others: int) -> None:
    lost = _Completion("a", error=UnavailableError("gone"))
    running = [_Completion("b", hangs=True) for _ in range(others)]
    with pytest.raises(UnavailableError, match="gone"):
        async with _choices(lost, *running) as choices:
            async for _ in choices.pieces():
                pass
    assert [one.num_left for one in (lost, *running)] == [1] * (1 + others)


async def test_what_goes_wrong_before_a_prompt_is_read_is_raised_at_once() -> None:
    refused = _Completion(error=OverloadedError("full"))
    waiting = _Completion(hangs=True)
    with pytest.raises(OverloadedError, match="full"):
        async with _choices(waiting, refused) as choices:
            await choices.wait_begun()
    assert (refused.num_left, waiting.num_left) == (1, 1)


@pytest.mark.parametrize("count", [1, 2])
async def test_silence_is_told_and_loses_nothing(count: int) -> None:
    silent = [_Completion(hangs=True) for _ in range(count)]
    async with _choices(*silent) as choices:
        assert not await choices.wait_begun(0.01)
    talking = [_Completion("a", hangs=True) for _ in range(count)]
    heard: list[str] = []
    async with _choices(*talking) as choices:
        async for _, piece in choices.pieces(0.01):
            assert piece is not None
            heard.append(piece.text)
            if heard.count("") == 3:
                break
    assert heard == ["a"] * count + [""] * 3
    assert [one.num_left for one in talking] == [1] * count


async def test_a_reader_that_leaves_ends_all_and_leaves_no_task_behind() -> None:
    completions = [_Completion(*"abcdef", hangs=True) for _ in range(3)]
    before = asyncio.all_tasks()
    async with _choices(*completions) as choices:
        async for _ in choices.pieces():
            break
    assert [one.num_left for one in completions] == [1, 1, 1]
    assert asyncio.all_tasks() == before


async def test_each_is_counted_where_it_is() -> None:
    gauges = _Gauges()
    short, long, silent = (
        _Completion("a"),
        _Completion("b", hangs=True),
        _Completion(hangs=True),
    )
    assert gauges.values() == [0, 0]
    async with gauges.choices(short, long, silent) as choices:
        assert gauges.values() == [3, 0]
        ends = [index async for index, piece in _until_silent(choices) if piece is None]
        assert ends == [0]
        assert gauges.values() == [1, 1]
    assert gauges.values() == [0, 0]
    with pytest.raises(UnavailableError):
        async with gauges.choices(_Completion("a", error=UnavailableError("gone"))) as choices:
            assert await choices.wait_begun()
            assert gauges.values() == [0, 1]
            async for _ in choices.pieces():
                pass
    assert gauges.values() == [0, 0]


async def _until_silent(choices: Choices) -> AsyncIterator[tuple[int, Piece | None]]:
    async for index, piece in choices.pieces(0.05):
        if piece is not None and not piece:
            return
        yield index, piece
