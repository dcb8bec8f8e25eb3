"""Fields as the client named them, also in what a service says about its request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.media_schemas import MediaLoading, MediaProcessing
from gateway.schemas import ChatCompletionRequest
from hippo.errors import InvalidRequestError, MediaError
from hippo.types import MediaKind


def limit_field(request: ChatCompletionRequest) -> str:
    """The one of OpenAI's two names for the token limit that the client knows of."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def frame_fields(request: ChatCompletionRequest) -> dict[str, str]:
    """The frame plan's fields by their names in the protocol; what was not sent has the name that
    it would have."""
    frames = request.mm_processor_kwargs or MediaProcessing()
    loading = (request.media_io_kwargs or MediaLoading()).video
    names = {
        name: f"mm_processor_kwargs.{name}"
        for name in ("fps", "min_frames", "max_frames", "max_pixels")
    }
    if frames.fps is None and loading.fps is not None:
        names["fps"] = "media_io_kwargs.video.fps"
    if frames.num_frames is not None:
        names["max_frames"] = "mm_processor_kwargs.num_frames"
    elif frames.max_frames is None and loading.num_frames is not None:
        names["max_frames"] = "media_io_kwargs.video.num_frames"
    return names


def media_parts(request: ChatCompletionRequest) -> Iterator[tuple[str, MediaKind, str]]:
    """Field, kind and URL of the videos and images of all messages, in order."""
    for i, message in enumerate(request.messages):
        for k, part in enumerate(message.content):
            if part.media is not None:
                kind, media_url = part.media
                yield f"messages.{i}.content.{k}.{kind.value}_url", kind, media_url.url


def in_clients_words(
    error: InvalidRequestError, request: ChatCompletionRequest
) -> InvalidRequestError:
    """A service's error with the client's name of the field at fault, in its text as in
    ``param``."""
    items = [field for field, _, _ in media_parts(request)]
    if isinstance(error, MediaError) and error.param is None and len(items) == 1:
        return MediaError(error.message, param=items[0])
    places = {f"media[{index}]": field for index, field in enumerate(items)}
    if error.param in places:
        return type(error)(error.message, param=places[error.param])
    names = {"max_tokens": limit_field(request), **frame_fields(request)}
    if error.param not in names:
        return error
    pattern = r"(?<![\w.])" + re.escape(error.param) + r"(?!\w)"
    name = names[error.param]
    return type(error)(re.sub(pattern, name, error.message), param=name)
