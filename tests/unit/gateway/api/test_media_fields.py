"""What a request says about frames and sizes, in the words of vLLM's clients."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.api import media_fields
from gateway.api.schemas import ChatCompletionRequest
from gateway.media.reader import FrameTimes, MediaSource
from hippo.errors import ContextLengthError, InvalidRequestError
from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, TextPart
from tests.support.running.gateways import chat_request
from tests.support.running.info import small_model_info
from tests.support.running.services import toy_request

INFO = small_model_info()
CLIP = {"type": "video_url", "video_url": {"url": "https://a.example/clip.mp4"}}


def _parse(*parts: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    content = [*parts, {"type": "text", "text": "Hi"}]
    return chat_request(messages=[{"role": "user", "content": content}], **fields)


def _frames(
    processing: dict[str, Any] | None = None, uuid: str | None = None, **video: Any
) -> ChatCompletionRequest:
    url = {"url": "data:video/jpeg;base64,AAAA,BBBB"}
    part = {"type": "video_url", "video_url": url, "uuid": uuid}
    return _parse(part, mm_processor_kwargs=processing, media_io_kwargs={"video": video})


def _source(request: ChatCompletionRequest, owner: str | None = None) -> MediaSource:
    (source,) = media_fields.media_sources(request, INFO, owner)
    return source


def _plan(processing: dict[str, Any], loading: dict[str, Any] | None = None) -> FramePlan:
    request = _parse(mm_processor_kwargs=processing, media_io_kwargs={"video": loading or {}})
    return media_fields.frame_plan(request)


def test_the_colour_behind_transparent_pixels_is_planned() -> None:
    colour = {"image": {"rgba_background_color": [10, 20, 30]}}
    assert media_fields.frame_plan(_parse(media_io_kwargs=colour)).background == 1 + 0x0A141E


@pytest.mark.parametrize(
    ("processing", "loading", "plan"),
    [
        ({}, {}, FramePlan()),
        ({"num_frames": 16}, {}, FramePlan(num_frames=16)),
        ({}, {"num_frames": 16}, FramePlan(num_frames=16)),
        ({}, {"num_frames": -1, "fps": 2.5}, FramePlan(fps=2.5)),
        ({"fps": 2.5, "max_frames": 9}, {}, FramePlan(fps=2.5, max_frames=9)),
        ({"fps": [2.5, 2.5]}, {}, FramePlan(fps=2.5)),
        # vLLM's loader takes the smaller number of frames.
        ({}, {"num_frames": 32, "fps": 2}, FramePlan(fps=2, max_frames=32)),
        ({"fps": 2}, {"num_frames": 32}, FramePlan(fps=2, max_frames=32)),
        ({"fps": 2, "max_frames": 8}, {"num_frames": 32}, FramePlan(fps=2, max_frames=8)),
        ({"min_pixels": 50, "max_pixels": 70}, {}, FramePlan(min_pixels=50, max_pixels=70)),
        ({"size": {"longest_edge": 70}}, {}, FramePlan(max_pixels=70)),
        ({"size": {"shortest_edge": 50}}, {}, FramePlan(min_pixels=50)),
    ],
)
def test_frames_are_planned_by_every_name(
    processing: dict[str, Any], loading: dict[str, Any], plan: FramePlan
) -> None:
    assert _plan(processing, loading) == plan


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_frames": 8, "fps": 2}, "num_frames and fps exclude each other"),
        ({"num_frames": 8, "max_frames": 8}, "num_frames and max_frames exclude each other"),
        ({"max_pixels": 8, "size": {"longest_edge": 9}}, "max_pixels and size.longest_edge differ"),
        ({"min_pixels": 9, "max_pixels": 8}, r"min_pixels is 9, more than max_pixels \(8\)"),
        ({"fps": [1, 2]}, "different rates"),
        ({"fps": []}, "different rates"),
        ({"size": {"height": 9}}, "height"),
        ({"image": {"rgba_background_color": [10, 20]}}, "rgba_background_color"),
        ({"image": {"rgba_background_color": [10, 20, 256]}}, "rgba_background_color"),
        ({"image": {"rgba_background_color": "red"}}, "rgba_background_color"),
        ({"video": {"frames_indices": []}}, "at least 1 item"),
        ({"video": {"frames_indices": [3, 3]}}, "must ascend"),
        ({"video": {"frames_indices": [-1, 3]}}, "must ascend from 0"),
        ({"video": {"frames_indices": [0, 2**31]}}, "must ascend"),
        ({"video": {"frames_indices": [0, 9], "total_num_frames": 9}}, "more than the last"),
        ({"video": {"duration": 0}}, "greater than 0"),
        ({"video": {"duration": float("inf")}}, "finite"),
        ({"video": {"total_num_frames": 0}}, "greater than or equal to 1"),
        ({"video": {"do_sample_frames": True}}, "should be False"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: dict[str, Any], words: str) -> None:
    is_loading = fields.keys() <= {"image", "video"}
    with pytest.raises(ValidationError, match=words):
        _parse(**{"media_io_kwargs" if is_loading else "mm_processor_kwargs": fields})


VIDEO, PROCESSING = "media_io_kwargs.video.", "mm_processor_kwargs."


@pytest.mark.parametrize(
    ("processing", "loading", "param", "words"),
    [
        ({"fps": 2}, {"fps": 3}, VIDEO + "fps", "mm_processor_kwargs says 2"),
        ({"num_frames": 2}, {"num_frames": 3}, VIDEO + "num_frames", "give one"),
        ({"max_frames": 8}, {"num_frames": 4}, VIDEO + "num_frames", "exclude each other"),
        ({"min_frames": 8, "fps": 1}, {"num_frames": 4}, PROCESSING + "min_frames", "more than"),
        ({"do_sample_frames": False}, {}, PROCESSING + "do_sample_frames", "say which frames"),
        (
            {"do_sample_frames": False, "fps": 2},
            {},
            PROCESSING + "do_sample_frames",
            "mm_processor_kwargs.fps samples frames",
        ),
        ({}, {"frames_indices": [0]}, VIDEO + "frames_indices", "sent one by one"),
        ({}, {"total_num_frames": 9}, VIDEO + "total_num_frames", "sent one by one"),
        ({}, {"duration": 2.0}, VIDEO + "duration", "sent one by one"),
        ({"do_sample_frames": True}, {}, None, ""),
        ({"do_sample_frames": False}, {"num_frames": 8}, None, ""),
    ],
)
def test_two_places_that_contradict_each_other_are_named(
    processing: dict[str, Any], loading: dict[str, Any], param: str | None, words: str
) -> None:
    loadings = {"video": loading, "image": {"image_mode": "RGB"}}
    request = _parse(CLIP, mm_processor_kwargs=processing, media_io_kwargs=loadings)
    expected = nullcontext() if param is None else pytest.raises(InvalidRequestError, match=words)
    with expected as caught:
        media_fields.frame_plan(request)
        assert len(media_fields.media_sources(request, INFO)) == 1
    assert caught is None or caught.value.param == param


def test_frames_of_qwen_vl_utils_are_taken_with_their_rate() -> None:
    """Qwen's example for vLLM sends frames one by one, and their rates as a list."""
    assert _source(_frames({"fps": [2.0], "do_sample_frames": False})).times == FrameTimes(2.0)
    with pytest.raises(InvalidRequestError, match="are all used"):
        _source(_frames({"do_sample_frames": True}))


def test_a_uuid_is_each_keys_own_and_needs_its_item() -> None:
    def key(owner: str | None, uuid: str = "a") -> str:
        return _source(_parse({**CLIP, "uuid": uuid}), owner).uuid

    assert key("alice") == key("alice")
    assert len({key("alice"), key("bob"), key(None), key("alice", "b")}) == 4
    assert _source(_parse(CLIP)).uuid == ""
    for absent in (None, {"url": None}):
        with pytest.raises(ValidationError, match="a part with a uuid needs its video_url"):
            _parse({"type": "video_url", "video_url": absent, "uuid": "a"})
    with pytest.raises(ValidationError, match="cannot have the field 'uuid'"):
        _parse({"type": "text", "text": "Hi", "uuid": "a"})


def test_frames_of_one_uuid_at_other_times_are_another_item() -> None:
    assert len({_source(_frames(uuid="a", fps=fps)).uuid for fps in (1, 1, 2)}) == 2


def test_many_images_are_taken_and_more_than_tokens_are_not() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert len(media_fields.media_sources(_parse(*[image] * 64), INFO)) == 64
    with pytest.raises(ContextLengthError, match="1000 videos and images"):
        media_fields.media_sources(_parse(*[image] * 1000), INFO)


def test_items_are_told_apart_by_uuid_or_file_or_content() -> None:
    def key(**changes: Any) -> bytes:
        item = dataclasses.replace(Media(MediaKind.VIDEO, b"data"), **changes)
        return media_fields.affinity_key(_parse(), "salt", [item])

    file = {"data": b"", "path": "/a", "num_bytes": 1, "modified_ns": 2}
    assert len({key(), key(data=b"other"), key(**file), key(**{**file, "modified_ns": 3})}) == 4
    assert key(uuid="a") == key(uuid="a", data=b"other") != key(uuid="b")


def _limit(max_tokens: int, *, num_words: int = 10, ceiling: int | None = None) -> int:
    turn = ChatMessage("user", (MediaPart(0), TextPart("a")))
    request = toy_request(max_tokens=max_tokens, messages=(turn,))
    limited = media_fields.with_visual_limit(request, num_words, INFO, ceiling=ceiling)
    return limited.frame_plan.max_visual_tokens


def test_videos_get_three_quarters_of_the_context_or_what_text_and_answer_leave() -> None:
    for max_tokens, num_words in ((100, 10), (200, 10), (100, 100)):
        assert _limit(max_tokens, num_words=num_words) == 750
    for max_tokens, num_words in ((300, 10), (100, 300), (800, 10)):
        left = 1000 - max_tokens - num_words - 30  # 30: of the chat template, at most
        assert left * 15 / 16 <= _limit(max_tokens, num_words=num_words) <= left + 30
    assert _limit(300, num_words=8) == _limit(300)
    assert _limit(100, ceiling=200) == 200
    assert 750 < _limit(100, ceiling=2000) <= 900
    assert _limit(1000) == 1  # the services say that the prompt does not fit


def test_the_turns_of_a_conversation_have_one_frame_plan_while_there_is_room() -> None:
    """At another plan the caches would not know the frames of the turn before."""
    plans = {_limit(limit, num_words=10 + 20 * turn) for turn in range(9) for limit in (16, 50)}
    assert plans == {750}
    later = [_limit(50, num_words=10 + 20 * turn) for turn in range(9, 20)]
    assert later == sorted(later, reverse=True)
    assert len(set(later)) < len(later)


def test_frames_are_a_second_apart_unless_the_request_says_otherwise() -> None:
    indices: dict[str, Any] = {"fps": 10, "frames_indices": [5, 20]}
    for request, times in (
        (_frames(), FrameTimes(1.0)),
        (_frames(fps=4), FrameTimes(4.0)),
        (_frames({"fps": 3}), FrameTimes(3.0)),
        (_frames(**indices), FrameTimes(10.0, (5, 20))),
        (_frames(**indices, total_num_frames=45), FrameTimes(10.0, (5, 20), 4.5)),
        (_frames(duration=7.5), FrameTimes(1.0, (), 7.5)),
    ):
        assert _source(request).times == times
