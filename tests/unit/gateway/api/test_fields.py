"""A service's error is about the fields that the client sent."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.schemas import ChatCompletionRequest
from gateway.api.translate import in_clients_words
from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
from tests.support.running.gateways import chat_request


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_has_the_name_that_was_sent(name: str) -> None:
    error = ContextLengthError("max_tokens is 9; num_max_tokens", param="max_tokens")
    told = in_clients_words(error, chat_request(**{name: 9}))
    assert type(told) is ContextLengthError
    assert (told.message, told.param) == (f"{name} is 9; num_max_tokens", name)


def test_other_fields_are_left_as_they_are() -> None:
    for param in ("temperature", None):
        told = in_clients_words(InvalidRequestError("too hot", param=param), chat_request())
        assert (told.message, told.param) == ("too hot", param)


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("max_frames", "mm_processor_kwargs.num_frames"),
        ("max_frames", "mm_processor_kwargs.max_frames"),
        ("max_frames", "media_io_kwargs.video.num_frames"),
        ("min_frames", "mm_processor_kwargs.min_frames"),
        ("fps", "mm_processor_kwargs.fps"),
        ("fps", "media_io_kwargs.video.fps"),
        ("max_pixels", "mm_processor_kwargs.max_pixels"),
    ],
)
def test_what_says_which_frames_has_the_name_that_was_sent(param: str, name: str) -> None:
    sent: Any = 1
    for field in reversed(name.split(".")):
        sent = {field: sent}
    error = InvalidRequestError(f"{param} is 1; 2 to 768 frames", param=param)
    told = in_clients_words(error, chat_request(**sent))
    assert (told.message, told.param) == (f"{name} is 1; 2 to 768 frames", name)


def _about(num_videos: int) -> ChatCompletionRequest:
    video = {"type": "video_url", "video_url": {"url": "a"}}
    turn = {"role": "user", "content": [{"type": "text", "text": "which?"}, *[video] * num_videos]}
    return chat_request(messages=[{"role": "system", "content": "Be brief."}, turn])


def test_an_item_has_its_place_in_the_request() -> None:
    error = MediaError("the video is cut off at 30 fps", param="media[1]")
    told = in_clients_words(error, _about(2))
    assert type(told) is MediaError
    assert (told.message, told.param) == (error.message, "messages.1.content.2.video_url")


def test_an_error_about_all_items_is_an_only_ones() -> None:
    error = MediaError("the model's processor refuses the media")
    assert in_clients_words(error, _about(1)).param == "messages.1.content.1.video_url"
    assert in_clients_words(error, _about(2)).param is None
