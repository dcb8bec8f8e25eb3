"""Translates a request's fields about videos and images: their sources, frames and sizes."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.api.media_schemas import field_error
from gateway.api.schemas import ChatCompletionRequest
from gateway.media.reader import FrameTimes, MediaSource
from hippo.errors import ContextLengthError
from hippo.models.interface.context import visual_limit
from hippo.types import FramePlan, Media, MediaKind, ModelInfo, OpenRequest

# vLLM's default for frames sent one by one: one frame per second.
DEFAULT_LISTED_FPS = 1.0
# Upper bounds of what a family's chat template adds to the text: once, for each message, and for
# each item beside its visual tokens and the text of its frames. Qwen2.5-VL's adds 14 (the default
# system message and the generation prompt), 5 and 2; LLaVA-OneVision's 3, 5 and 1.
TEMPLATE_TOKENS, MESSAGE_TOKENS, ITEM_TOKENS = 16, 6, 3


def media_sources(
    request: ChatCompletionRequest, info: ModelInfo, owner: str | None = None
) -> list[MediaSource]:
    """Returns the videos and images of all messages, in order; each ``owner`` (the name of an API
    key) has uuids of its own.

    Raises InvalidRequestError for frame times in a request without a list of frames, and for
    options of sampling that cannot apply; ContextLengthError for more items than tokens.
    """
    times = _frame_times(request)
    sources = [
        MediaSource(kind, url, field, times, uuid and _own_uuid(uuid, owner, times))
        for field, kind, url, uuid in media_parts(request)
    ]
    if len(sources) >= info.max_context_length:  # each has a visual token at least
        raise ContextLengthError(
            f"the request has {len(sources)} videos and images, more than fit into the context of "
            f"{info.max_context_length} tokens",
            param="messages",
        )
    given = request.loading.video.given("frames_indices", "total_num_frames", "duration")
    if given and not any(source.is_frame_list for source in sources):
        raise field_error(
            f"media_io_kwargs.video.{given[0]}",
            "is for frames sent one by one, and the request has no video_url with data:video/jpeg",
        )
    _check_sampling(request, sources)
    return sources


def _own_uuid(uuid: str, owner: str | None, times: FrameTimes) -> str:
    """Returns the key of caches: other keys' uuids, and other times of the frames, are others."""
    return hashlib.sha256(repr((owner, uuid, times)).encode()).hexdigest()


def _check_sampling(request: ChatCompletionRequest, sources: Sequence[MediaSource]) -> None:
    """Refuses values of do_sample_frames that contradict the rest of the request."""
    frames, loading = request.processing, request.loading.video
    are_listed = [each.is_frame_list for each in sources if each.kind is MediaKind.VIDEO]
    problem = None
    if frames.do_sample_frames is False and not all(are_listed):
        if frames.frame_fields:
            problem = f"is false, but mm_processor_kwargs.{frames.frame_fields[0]} samples frames"
        elif max(loading.fps or 0, loading.num_frames or 0) <= 0:
            problem = "is false; say which frames with media_io_kwargs.video (num_frames, fps)"
    elif frames.do_sample_frames and any(are_listed) and frames.num_frames is None:
        problem = "is true, but frames that are sent one by one are all used, or num_frames"
    if problem is not None:
        raise field_error("mm_processor_kwargs.do_sample_frames", problem)


def _frame_times(request: ChatCompletionRequest) -> FrameTimes:
    """Applies vLLM's rule: the time of a frame is its number / fps, and fps is 1 by default."""
    loading = request.loading.video
    fps = max(loading.fps or 0.0, 0.0) or request.processing.fps or DEFAULT_LISTED_FPS
    duration_s = loading.duration
    if duration_s is None and loading.total_num_frames is not None:
        duration_s = loading.total_num_frames / fps
    return FrameTimes(fps, loading.frames_indices or (), duration_s)


def affinity_key(request: ChatCompletionRequest, salt: str, media: Sequence[Media]) -> bytes:
    """Returns a hash of the services' cache salt and the media (if there are none: the first
    message).

    Requests with equal keys can share cached results. Slow for large files.
    """
    digest = hashlib.sha256(salt.encode())
    for item in media:
        file = (item.path, item.num_bytes, item.modified_ns) if item.path else ()
        digest.update(repr(item.uuid or file).encode())
        digest.update(b"" if item.uuid else item.data)
    if not media:
        digest.update(repr(request.messages[0]).encode())
    return digest.digest()


def frame_plan(request: ChatCompletionRequest) -> FramePlan:
    """Returns the frame plan of mm_processor_kwargs, with gaps filled from media_io_kwargs.

    As in vLLM's loader, ``num_frames`` beside ``fps`` is the most frames at this rate; alone it is
    the number of evenly spaced frames.
    """
    for name in ("fps", "num_frames"):
        one, other = getattr(request.processing, name), getattr(request.loading.video, name)
        if one and other and other > 0 and one != other:
            raise field_error(
                f"media_io_kwargs.video.{name}",
                f"is {other:g}, mm_processor_kwargs says {one:g}; give one of them",
            )
    values, names = frame_fields(request)
    count, fewest, most = (values[name] for name in ("num_frames", "min_frames", "max_frames"))
    if count and values["fps"]:
        most, count = min(count, most or count), 0
    if count and (fewest or most):
        other = names["min_frames" if fewest else "max_frames"]
        raise field_error(names["num_frames"], f"and {other} exclude each other; give one of them")
    if 0 < most < fewest:
        why = f"is {fewest}, more than {names['max_frames']} ({most})"
        raise field_error(names["min_frames"], why)
    colour = request.loading.image.rgba_background_color
    background = 0 if colour is None else 1 + int.from_bytes(bytes(colour))
    values |= {"num_frames": count, "max_frames": most, "background": background}
    return FramePlan(**values)


def frame_fields(request: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the given values of the frame plan's fields (0: none), and the client's name of each;
    a field that was not sent has its name in mm_processor_kwargs."""
    frames, loading = request.processing, request.loading.video
    values = {}
    names = {"background": "media_io_kwargs.image.rgba_background_color"}
    for name, other, place in (
        ("fps", loading.fps, "media_io_kwargs.video.fps"),
        ("num_frames", loading.num_frames, "media_io_kwargs.video.num_frames"),
        ("min_frames", None, ""),
        ("max_frames", None, ""),
        ("min_pixels", frames.size.shortest_edge, "mm_processor_kwargs.size.shortest_edge"),
        ("max_pixels", frames.size.longest_edge, "mm_processor_kwargs.size.longest_edge"),
    ):
        own = getattr(frames, name)
        values[name] = own or max(other or 0, 0)
        names[name] = place if own is None and other is not None else f"mm_processor_kwargs.{name}"
    if not values["max_frames"] and (frames.num_frames or loading.num_frames) is not None:
        names["max_frames"] = names["num_frames"]
    return values, names


def with_visual_limit(
    request: OpenRequest, num_text_tokens: int, info: ModelInfo, *, ceiling: int | None
) -> OpenRequest:
    """Returns the request with the most visual tokens that its videos may have together.

    This is ``visual_limit`` of the target's context beside the text and ``max_tokens``. Images are
    not subtracted, because their sizes are unknown here.
    """
    num_template_tokens = (
        TEMPLATE_TOKENS + MESSAGE_TOKENS * len(request.messages) + ITEM_TOKENS * len(request.media)
    )
    num_others = num_text_tokens + num_template_tokens + request.max_tokens
    limit = visual_limit(info.max_context_length, num_others, ceiling)
    plan = dataclasses.replace(request.frame_plan, max_visual_tokens=limit)
    return dataclasses.replace(request, frame_plan=plan)


def media_parts(request: ChatCompletionRequest) -> Iterator[tuple[str, MediaKind, str, str]]:
    """Yields (field path, kind, URL, uuid or "") of each video and image of all messages."""
    for i, message in enumerate(request.messages):
        for k, part in enumerate(message.content):
            if part.media is not None:
                kind, media_url = part.media
                field = f"messages.{i}.content.{k}.{kind.value}_url"
                yield field, kind, media_url.url, part.uuid or ""
