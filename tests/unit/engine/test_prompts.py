"""From an opened request to its prompt."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llguidance import grammar_from

from hippo.engine.grammars import GrammarCompiler
from hippo.engine.media_cache import Decoder
from hippo.engine.prompts import NUM_READER_THREADS, PromptReader, fitting_max_tokens
from hippo.errors import ContextLengthError, MediaError
from hippo.models.interface.base import DecodedMedia
from hippo.sampling.masks import TokenMasks
from hippo.types import (
    ChatMessage,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    OpenRequest,
    SamplingParams,
)
from tests.support.models.letters import letter_tokenizer
from tests.support.models.toy_model import ToyDecoder, ToyModel
from tests.support.running.info import small_model_info
from tests.support.running.services import toy_request


class OneWorker:
    """Decodes one item after the other; b"slow" takes for ever, b"bad" is refused."""

    def __init__(self) -> None:
        self.num_wanted = 0  # items that wait or are at work
        self._lock = asyncio.Lock()

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        self.num_wanted += 1
        try:
            async with self._lock:
                if media.data == b"bad":
                    raise MediaError("no video")
                if media.data.startswith(b"slow"):
                    await asyncio.Event().wait()
                return await ToyDecoder().decode(media, plan)
        finally:
            self.num_wanted -= 1


class SlowCompiler(GrammarCompiler):
    """Compiles grammars of the letters a and b, once it may."""

    def __init__(self) -> None:
        letters = [*'ab{": 1}']
        info = replace(
            small_model_info(),
            tokenizer_json=letter_tokenizer(letters, ("<end>",)),
            num_token_ids=len(letters) + 1,
            end_token_ids=(len(letters),),
        )
        super().__init__(info)
        self.may_compile = asyncio.Event()

    async def compile_request(self, request: OpenRequest) -> TokenMasks:
        await asyncio.wait_for(self.may_compile.wait(), 30)
        return await super().compile_request(request)


@pytest.fixture
def readers() -> Iterator[list[PromptReader]]:
    made: list[PromptReader] = []
    yield made
    for reader in made:
        reader.close()


def _request(*data: bytes) -> OpenRequest:
    parts = tuple(map(MediaPart, range(len(data))))
    media = tuple(Media(MediaKind.VIDEO, one) for one in data)
    return toy_request(messages=(ChatMessage("user", parts),), media=media)


def _reader(
    readers: list[PromptReader], decoder: Decoder, compiler: GrammarCompiler | None = None
) -> PromptReader:
    frames_of_8 = 8 * 8 * 8 * 3
    readers.append(
        PromptReader(ToyModel(), decoder, max_decoded_bytes=frames_of_8, compiler=compiler)
    )
    return readers[-1]


async def test_items_of_a_refused_request_are_decoded_no_further(
    readers: list[PromptReader],
) -> None:
    decoder = OneWorker()
    reader = _reader(readers, decoder)
    with pytest.raises(MediaError, match="no video") as caught:
        await reader.read_prompt(_request(b"bad", *(b"slow%d" % i for i in range(7))))
    assert caught.value.param == "media[0]"
    await asyncio.sleep(0)
    assert decoder.num_wanted == 0
    read = await asyncio.wait_for(reader.read_prompt(_request(b"toy:4")), 30)
    assert read.prompt.length == 16


class Planned(ToyDecoder):
    """Remembers by which plan it decoded each item."""

    def __init__(self) -> None:
        self.plans: dict[bytes, FramePlan] = {}

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        self.plans[media.data] = plan
        return await super().decode(media, plan)


@pytest.mark.parametrize(
    ("limit", "share"),
    [
        (0, 0),  # no limit
        (101, 50),
        (1, 1),  # not 0, which is no limit
    ],
)
async def test_the_videos_of_a_request_share_their_visual_tokens_equally(
    readers: list[PromptReader], limit: int, share: int
) -> None:
    """An image has none of them."""
    decoder, names = Planned(), (b"toy:2", b"toy:02", b"toy:1")
    request = _request(*names)
    image = replace(request.media[2], kind=MediaKind.IMAGE)
    plan = FramePlan(max_visual_tokens=limit)
    request = replace(request, media=(*request.media[:2], image), frame_plan=plan)
    await _reader(readers, decoder).read_prompt(request)
    found = {name: decoder.plans[name].max_visual_tokens for name in names[:2]}
    assert found == {b"toy:2": share, b"toy:02": share}


async def test_the_frames_of_a_request_are_bounded_together(readers: list[PromptReader]) -> None:
    decoder = OneWorker()
    reader = _reader(readers, decoder)
    assert (await reader.read_prompt(_request(b"toy:4", b"toy:04"))).prompt.length == 32
    with pytest.raises(MediaError, match="send fewer or smaller ones"):
        await reader.read_prompt(_request(b"toy:4", b"toy:5", b"slow"))
    await asyncio.sleep(0)
    assert decoder.num_wanted == 0


async def test_requests_that_wait_for_the_same_file_name_it_by_their_own_place(
    readers: list[PromptReader],
) -> None:
    reader = _reader(readers, OneWorker())
    found = await asyncio.gather(
        reader.read_prompt(_request(b"toy:4", b"bad")),
        reader.read_prompt(_request(b"bad", b"toy:4")),
        return_exceptions=True,
    )
    errors = [error for error in found if isinstance(error, MediaError)]
    assert [error.param for error in errors] == ["media[1]", "media[0]"]


async def test_a_prompt_does_not_wait_for_the_grammars_of_others(
    readers: list[PromptReader],
) -> None:
    compiler = SlowCompiler()
    reader = _reader(readers, ToyDecoder(), compiler)
    sampling = SamplingParams(grammar=grammar_from("regex", "a+b"))
    constrained = toy_request(sampling=sampling, end_token_ids=(8,))
    waiting = [
        asyncio.create_task(reader.read_prompt(constrained)) for _ in range(NUM_READER_THREADS)
    ]
    try:
        read = await asyncio.wait_for(reader.read_prompt(toy_request()), 30)
        assert read.masks is None and not any(task.done() for task in waiting)
    finally:
        compiler.may_compile.set()
    assert all(read.masks is not None for read in await asyncio.gather(*waiting))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "is_default", "expected"),
    [(40, True, 60), (40, False, 60), (41, True, 59), (99, True, 1), (0, True, 60)],
)
def test_a_default_limit_is_what_is_left(
    num_prompt_tokens: int, is_default: bool, expected: int
) -> None:
    request = toy_request(max_tokens=60, is_max_tokens_default=is_default)
    assert fitting_max_tokens(request, num_prompt_tokens, max_context_length=100) == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "changes", "param", "words"),
    [
        (41, {"is_max_tokens_default": False}, "max_tokens", "max_tokens is 60: together 101"),
        (100, {}, "messages", "has 100 tokens, which leaves no room"),
        (4000, {}, "messages", "has 4000 tokens, which leaves no room"),
        (95, {"committed_ids": (4,) * 5}, "messages", "leaves no room"),
        (95, {"sampling": SamplingParams(min_tokens=6)}, "min_tokens", "min_tokens is 6: together"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_what_was_asked(
    num_prompt_tokens: int, changes: dict[str, Any], param: str, words: str
) -> None:
    request = toy_request(**({"max_tokens": 60, "is_max_tokens_default": True} | changes))
    with pytest.raises(ContextLengthError, match=words) as caught:
        fitting_max_tokens(request, num_prompt_tokens, max_context_length=100)
    assert caught.value.param == param
