"""What media the services hold, and for how long; which files they open by path, and what the
gateway does if they cannot."""

import asyncio
import contextlib
import dataclasses
import os
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from gateway.answer.report import AnswerRecord
from gateway.common.config import GatewaySettings
from hippo.engine.fairness import PrefillShare
from hippo.engine.prompts import NUM_READER_THREADS
from hippo.errors import InvalidRequestError, MediaError, MediaPathError
from hippo.models.interface.base import Prompt
from hippo.types import (
    ChatMessage,
    ContentPart,
    Media,
    MediaKind,
    MediaPart,
    OpenRequest,
    PromptInfo,
    Selection,
    TextPart,
    Timing,
    Verdict,
)
from tests.support.clips import at_path
from tests.support.models.toy_model import ToyDecoder, ToyModel
from tests.support.running.gate import Gate
from tests.support.running.gateways import CHAT, completed, serving_gateway, toy_chat, watching
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
    until,
    with_tokenizer,
)
from tests.support.watching.collector import living, no_collector


class WatchedModel(ToyModel):
    """Knows which pixels of the prompts that it made are still alive."""

    def __init__(self) -> None:
        super().__init__(num_slots=1)
        self._pixels: list[weakref.ref[torch.Tensor]] = []
        self.num_prepared = 0

    def prepare_prompt(self, *args: Any, **options: Any) -> Prompt:
        prompt = super().prepare_prompt(*args, **options)
        frames = [one.frames for one in args[1]]
        pixels = [item.pixels for item in prompt.items if item.pixels is not None]
        self._pixels += map(weakref.ref, (*frames, *pixels))
        self.num_prepared += 1
        return prompt

    def num_living(self) -> int:
        """How many tensors of frames and pixels are alive."""
        return sum(reference() is not None for reference in self._pixels)


def long_request(num_frames: int) -> OpenRequest:
    """A question about a video of 4 tokens a frame; a context has 512."""
    return toy_request(media=(Media(MediaKind.VIDEO, b"toy:%d" % num_frames),))


async def test_files_frames_and_pixels_are_freed_when_the_tower_has_run() -> None:
    model = WatchedModel()
    async with serving_target(model, media_cache_mb=0) as (service, client):
        backend_of(service).engine._warm_prompt = None  # which is kept, with its few pixels
        gate = Gate()
        model.on_piece = gate
        with no_collector():
            request = toy_request()
            num_files = len(living(Media))
            answering = asyncio.create_task(target_only(client, request))
            await until(gate.has_arrived.is_set)
            await until(lambda: not model.num_living())
            assert len(living(Media)) == num_files
            gate.open()
            assert (await answering).token_ids


async def test_a_draft_frees_them_while_it_waits_for_the_selection() -> None:
    model = WatchedModel()
    async with serving_draft(model, media_cache_mb=0) as (service, client):
        backend_of(service).engine._warm_prompt = None
        with no_collector():
            async with client.draft(toy_request()) as stream:
                assert isinstance(await anext(stream), PromptInfo)
                await until(lambda: not model.num_living())


async def test_only_the_next_in_line_are_decoded_while_they_wait_for_a_slot() -> None:
    model = WatchedModel()
    async with serving_target(model, max_waiting=8) as (service, client):
        num_before = model.num_prepared
        gate = Gate()
        model.on_piece = gate
        waiting = [asyncio.create_task(target_only(client, toy_request())) for _ in range(9)]
        await until(lambda: backend_of(service).slots.num_waiting == 8)
        await until(lambda: model.num_prepared == num_before + 1 + NUM_READER_THREADS)
        await until(gate.has_arrived.is_set)
        await asyncio.sleep(0.05)
        assert model.num_prepared == num_before + 1 + NUM_READER_THREADS
        gate.open()
        answers = await asyncio.gather(*waiting)
        assert model.num_prepared == num_before + 9
        assert all(answer.token_ids == answers[0].token_ids for answer in answers)


async def test_a_running_sequence_steps_between_two_pieces_of_the_tower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefillShare, "allows", lambda share, *_, **__: not share._has_run)
    monkeypatch.setattr(PrefillShare, "count_forward", lambda share, *_: share.count_no_forward())
    model = ToyModel()
    parts: list[ContentPart] = [*map(MediaPart, range(6)), TextPart("which?")]
    media = tuple(Media(MediaKind.VIDEO, b"toy:%d" % number) for number in range(1, 7))
    several = toy_request(messages=(ChatMessage("user", tuple(parts)),), media=media)
    async with serving_target(model, prefix_cache=False, vision_cache_mb=0) as (_, client):
        alone = await target_only(client, several)
        gate = Gate(3)
        model.on_forward = gate
        async with client.verify(toy_request(end_token_ids=(), max_tokens=400)) as running:
            assert isinstance(await anext(running), PromptInfo)
            await until(gate.has_arrived.is_set)
            num_forwards: list[int] = []
            model.on_embed = lambda _: num_forwards.append(len(model.plans))
            async with client.verify(several) as stream:
                assert isinstance(await anext(stream), PromptInfo)
                gate.open()
                verdicts = [each async for each in stream if isinstance(each, Verdict)]
    assert [id_ for verdict in verdicts for id_ in verdict.token_ids] == alone.token_ids
    first = num_forwards[0]
    assert num_forwards == list(range(first, first + 6))


async def test_a_draft_embeds_no_more_ahead_than_one_prompt_may_have() -> None:
    model = ToyModel(num_slots=3)
    async with serving_draft(model) as (_, client), contextlib.AsyncExitStack() as stack:
        num_before = model.num_embedded
        streams = []
        for num_frames in (100, 101, 102):
            stream = await stack.enter_async_context(client.draft(long_request(num_frames)))
            assert isinstance(await anext(stream), PromptInfo)
            streams.append((stream, Selection(tuple(range(4 * num_frames)), 4 * num_frames)))
        (first, of_first), (second, of_second), (third, of_third) = streams
        await until(lambda: model.num_embedded == num_before + 1)
        await third.send_message(of_third)  # the third need not wait for its turn any more
        assert isinstance(await anext(third), Timing)
        assert model.num_embedded == num_before + 2
        await first.send_message(of_first)
        await until(lambda: model.num_embedded == num_before + 3)
        await second.send_message(of_second)
        assert isinstance(await anext(second), Timing)


async def test_the_decoder_knows_the_name_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
    decoder = ToyDecoder()
    decode = AsyncMock(side_effect=decoder.decode)
    monkeypatch.setattr(decoder, "decode", decode)
    async with serving_target(with_tokenizer(ToyModel()), decoder) as (_, target):
        settings = GatewaySettings(
            target=(target.address,), api_keys=tuple(f"{name}={keys[name]}" for name in keys)
        )
        async with serving_gateway(settings) as http:
            for video, key in zip((b"toy:2", b"toy:4"), keys.values(), strict=True):
                headers = {"authorization": f"Bearer {key}"}
                body = toy_chat(video, max_tokens=2)
                (await http.post(CHAT, json=body, headers=headers)).raise_for_status()
        async with serving_gateway(GatewaySettings(target=(target.address,))) as http:
            (await http.post(CHAT, json=toy_chat(b"toy:6", max_tokens=2))).raise_for_status()
    clients = [call.kwargs["client"] for call in decode.await_args_list]
    assert clients == ["alice", "bob", "address 127.0.0.1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of media, beside one that no service may read."""
    for name in ("media", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clip.mp4").write_bytes(b"toy:4")
    os.mkfifo(tmp_path / "media" / "pipe")
    (tmp_path / "media" / "out.mp4").symlink_to(tmp_path / "private" / "clip.mp4")
    (tmp_path / "media" / "in.mp4").symlink_to(tmp_path / "media" / "clip.mp4")
    return tmp_path / "media"


def _about(item: Media) -> OpenRequest:
    return toy_request(media=(item,), end_token_ids=(), max_tokens=20)


async def test_a_service_opens_the_files_of_its_directories_alone(folder: Path) -> None:
    good = at_path(folder / "clip.mp4")
    async with serving_target(ToyModel(), allowed_local_media_path=(str(folder),)) as (_, client):
        assert (await client.get_model()).media_dirs == (str(folder),)
        expected = (await target_only(client, _about(Media(MediaKind.VIDEO, b"toy:4")))).token_ids
        for path in (folder / "clip.mp4", folder / "in.mp4"):
            assert (await target_only(client, _about(at_path(path)))).token_ids == expected
        for item, words in (
            (at_path(folder.parent / "private" / "clip.mp4"), "not under a directory"),
            (at_path(folder / "out.mp4"), "not under a directory"),
            (dataclasses.replace(good, path=f"{folder}/../private/clip.mp4"), "not under"),
            (dataclasses.replace(good, path="clip.mp4"), "not under a directory"),
            (dataclasses.replace(good, path=f"{folder}/missing.mp4"), "missing"),
            (dataclasses.replace(good, path=str(folder)), "cannot be read"),
            (at_path(folder / "pipe"), "cannot be read"),
            (dataclasses.replace(good, path="a\0b"), "cannot be read"),
            (dataclasses.replace(good, num_bytes=9), "size or time"),
            (dataclasses.replace(good, modified_ns=9), "size or time"),
        ):
            with pytest.raises(MediaPathError, match=words) as caught:
                await target_only(client, _about(item))
            assert caught.value.param == "media[0]"
            assert str(folder.parent) not in caught.value.message
        with pytest.raises(InvalidRequestError, match="is set beside data"):
            await target_only(client, _about(dataclasses.replace(good, data=b"toy:4")))


async def test_a_file_that_changed_is_read_again(folder: Path) -> None:
    path = folder / "clip.mp4"
    async with serving_target(ToyModel(), allowed_local_media_path=(str(folder),)) as (_, client):
        for num_frames in (4, 8):
            path.write_bytes(b"toy:%d" % num_frames)
            os.utime(path, ns=(0, (num_frames - 6) * 10**9))  # the first is older than 1970
            expected = await target_only(client, _about(Media(MediaKind.VIDEO, path.read_bytes())))
            answer = await target_only(client, _about(at_path(path)))
            assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("refuses", ["target", "draft", "both"])
async def test_where_a_service_cannot_open_a_file_its_bytes_are_sent(
    folder: Path, refuses: str
) -> None:
    request = _about(at_path(folder / "clip.mp4"))
    dirs = {
        name: () if refuses in (name, "both") else (str(folder),) for name in ("target", "draft")
    }
    target, draft = (with_tokenizer(ToyModel(num_slots=2)) for _ in range(2))
    in_bytes = _about(Media(MediaKind.VIDEO, b"toy:4"))
    copy_files = AsyncMock(return_value=in_bytes.media)
    record = AnswerRecord(policy="vpsd", received_ns=time.monotonic_ns())

    def wait_for_draft() -> None:  # on the target's thread
        while record.draft_prompt is None:
            time.sleep(0.005)

    async with (
        serving_target(target, allowed_local_media_path=dirs["target"]) as (_, target_client),
        serving_draft(draft, allowed_local_media_path=dirs["draft"]) as (_, draft_client),
    ):
        expected = await target_only(target_client, in_bytes)
        target.on_forward = lambda plan: wait_for_draft()
        async with watching([target_client], [draft_client]) as backends:
            completion = await completed(backends, request, record=record, copy_files=copy_files)
    assert completion.error is None
    assert completion.token_ids == expected.token_ids
    assert copy_files.await_count == (2 if refuses == "both" else 1)


async def test_a_file_that_can_neither_be_opened_nor_copied_is_an_error(folder: Path) -> None:
    copy_files = AsyncMock(side_effect=MediaError("too large for a message", param="media[0]"))
    request = _about(at_path(folder / "clip.mp4"))
    target, draft = (with_tokenizer(ToyModel()) for _ in range(2))
    async with serving_pair(target, draft) as clients:
        async with watching(*([each] for each in clients)) as backends:
            completion = await completed(backends, request, copy_files=copy_files)
    assert isinstance(completion.error, MediaError)
    assert completion.record.num_completion_tokens == 0
