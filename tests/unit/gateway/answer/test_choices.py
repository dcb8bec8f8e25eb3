"""Several completions read as one, whatever happens to one of them."""

import asyncio
from typing import cast

import pytest
from prometheus_client import Gauge

from gateway.answer.choices import Choices
from gateway.answer.completion import Completion
from gateway.answer.figures import UsageResponse
from gateway.answer.report import AnswerRecord
from gateway.answer.text import Piece, join_pieces
from hippo.errors import HippoError, OverloadedError, UnavailableError
from hippo.types import MediaKind, MediaUse, PromptInfo


class _Completion:
    """Says what it is told to say."""

    def __init__(self, news: asyncio.Event) -> None:
        self._news = news
        self._said: list[Piece] = []
        self.has_begun = self.is_over = self.is_left = False
        self.error: HippoError | None = None
        self.record = AnswerRecord("off", received_ns=0)

    async def __aenter__(self) -> "_Completion":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.is_left = True

    def say(self, text: str) -> None:
        self.has_begun = True
        self._said.append(Piece(text))
        self._news.set()

    def end(self, error: HippoError | None = None) -> None:
        self.is_over, self.error = True, error
        self._news.set()

    def take_text(self) -> Piece:
        said, self._said = self._said, []
        return join_pieces(said)


class _Scene:
    """Choices, and how many of them are counted as waiting and as running."""

    def __init__(self, count: int) -> None:
        news = asyncio.Event()
        self.completions = [_Completion(news) for _ in range(count)]
        self._gauges = [Gauge(name, name, registry=None) for name in ("waiting", "running")]
        waiting, running = self._gauges
        made = cast(list[Completion], self.completions)
        self.choices = Choices(made, news=news, waiting=waiting, running=running)

    @property
    def counted(self) -> list[float]:
        return [metric.samples[0].value for gauge in self._gauges for metric in gauge.collect()]


async def test_every_piece_comes_with_its_index_and_every_end_once() -> None:
    scene = _Scene(2)
    one, other = scene.completions
    async with scene.choices as choices:
        one.say("a")
        assert await choices.wait_begun()
        pieces = choices.pieces()
        assert await anext(pieces) == (0, Piece("a"))
        other.say("b")
        other.say("c")  # a slow reader gets both at once
        assert await anext(pieces) == (1, Piece("bc"))
        other.say("d")
        other.end()
        one.say("e")
        one.end()
        rest = [item async for item in pieces]
    assert rest == [(0, Piece("e")), (0, None), (1, Piece("d")), (1, None)]


async def test_an_error_of_one_ends_all() -> None:
    scene = _Scene(3)
    with pytest.raises(UnavailableError, match="gone"):
        async with scene.choices as choices:
            scene.completions[1].say("a")
            scene.completions[1].end(UnavailableError("gone"))
            async for index, piece in choices.pieces():
                assert (index, piece) == (1, Piece("a"))
    assert all(one.is_left for one in scene.completions)


async def test_what_goes_wrong_before_a_prompt_is_read_is_raised_at_once() -> None:
    scene = _Scene(2)
    async with scene.choices as choices:
        waiting = asyncio.create_task(choices.wait_begun())
        await asyncio.sleep(0)
        scene.completions[1].end(OverloadedError("full"))
        with pytest.raises(OverloadedError, match="full"):
            await waiting


async def test_silence_is_told_and_loses_nothing() -> None:
    scene = _Scene(2)
    async with scene.choices as choices:
        assert not await choices.wait_begun(0.01)
        pieces = choices.pieces(0.01)
        assert await anext(pieces) == (0, Piece())
        scene.completions[1].say("a")
        assert await anext(pieces) == (1, Piece("a"))
        assert await anext(pieces) == (0, Piece())


async def test_each_is_counted_where_it_is() -> None:
    scene = _Scene(3)
    short, long, _ = scene.completions
    assert scene.counted == [0, 0]
    async with scene.choices as choices:
        assert scene.counted == [3, 0]
        pieces = choices.pieces(0.01)
        short.say("a")
        long.say("b")
        assert [await anext(pieces) for _ in range(2)] == [(0, Piece("a")), (1, Piece("b"))]
        assert scene.counted == [1, 2]
        short.end()
        assert await anext(pieces) == (0, None)
        assert scene.counted == [1, 1]
    assert scene.counted == [0, 0]


def test_the_usage_says_what_the_model_sees_of_the_media() -> None:
    scene = _Scene(2)
    assert scene.choices.usage["prompt_tokens_details"]["media"] == []
    video = MediaUse(MediaKind.VIDEO, 32, 448, 252, 2304, notes=("the file is cut off",))
    prompt = PromptInfo(b"", 2400, 2304, media=(video, MediaUse(MediaKind.IMAGE, 1, 56, 28, 2)))
    scene.completions[1].record.target_prompt = prompt
    usage = UsageResponse.model_validate(scene.choices.usage)
    names = ("type", "num_frames", "width", "height", "num_tokens", "notes")
    shown = [["video", 32, 448, 252, 2304, ["the file is cut off"]], ["image", 1, 56, 28, 2, []]]
    media = [dict(zip(names, values, strict=True)) for values in shown]
    assert usage.prompt_tokens_details.model_dump()["media"] == media
