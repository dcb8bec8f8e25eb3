"""The part of a request that is about videos and images: where they are, which frames are taken."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hippo.types import MediaKind


def refusal(message: str) -> PydanticCustomError:
    # The message is a template with braces to fill: a plain one must not contain any.
    return PydanticCustomError("unsupported", "{text}", {"text": message})


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MediaUrl(Model):
    """Where a video or image is."""

    url: str = Field(
        description="A data: URL (data:video/mp4;base64,..., or frames as "
        "data:video/jpeg;base64,<jpg>,<jpg>,...), an http(s) URL of an allowed "
        "domain, a path (also as file:// URL) under an allowed directory, or the id of a video "
        "uploaded before (POST /v1/videos)."
    )
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="Inert; frame sizes are set by mm_processor_kwargs."
    )


class ContentPart(Model):
    """A piece of a message."""

    type: Literal["text", "video_url", "image_url"]
    text: str | None = None
    video_url: MediaUrl | None = None
    image_url: MediaUrl | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_what_its_type_says(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise refusal("expected an object with a type, such as {'type': 'text', 'text': ...}")
        kind = value.get("type")
        if kind not in ("text", "video_url", "image_url"):
            raise refusal(f"type is {kind!r}; expected 'text', 'video_url' or 'image_url'")
        if value.get(kind) is None:
            raise refusal(f"a part of type {kind!r} needs the field {kind!r}")
        for other in {"text", "video_url", "image_url"} - {kind}:
            if value.get(other) is not None:
                raise refusal(f"a part of type {kind!r} cannot have the field {other!r}")
        if kind != "text" and isinstance(value[kind], str):
            return {**value, kind: {"url": value[kind]}}
        return value

    @property
    def media(self) -> tuple[MediaKind, MediaUrl] | None:
        """The media item that the part refers to, if it does."""
        if self.video_url is not None:
            return MediaKind.VIDEO, self.video_url
        if self.image_url is not None:
            return MediaKind.IMAGE, self.image_url
        return None


class MediaProcessing(Model):
    """Which frames of the videos are looked at."""

    fps: float | None = Field(default=None, gt=0, le=120)
    min_frames: int | None = Field(default=None, ge=1, le=65536)
    max_frames: int | None = Field(default=None, ge=1, le=65536)
    num_frames: int | None = Field(
        default=None, ge=1, le=65536, description="Another name of max_frames."
    )
    max_pixels: int | None = Field(default=None, ge=1, le=2**31 - 1)

    @model_validator(mode="after")
    def _one_frame_limit(self) -> MediaProcessing:
        if self.max_frames is not None and self.num_frames is not None:
            raise refusal("max_frames and num_frames mean the same; give one of them")
        return self


class VideoLoading(Model):
    """How a video is read, in vLLM's words."""

    num_frames: int | None = Field(
        default=None, ge=-1, le=65536, description="Most frames; -1: no limit but the server's."
    )
    fps: float | None = Field(default=None, ge=-1, le=120, description="0 or less: not set.")
    frames_indices: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=65536,
        description="Of frames sent as video/jpeg: their numbers in the video they come from, "
        "ascending, at `fps` of that video.",
    )
    total_num_frames: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Frames of the video they come from."
    )
    duration: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Its length in seconds."
    )
    do_sample_frames: Literal[False] | None = Field(
        default=None, description="Inert: frames sent as video/jpeg are all looked at."
    )

    @property
    def timing_fields(self) -> tuple[str, ...]:
        """The fields given that say when frames sent one by one were taken."""
        names = ("frames_indices", "total_num_frames", "duration")
        return tuple(name for name in names if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _indices_ascend(self) -> VideoLoading:
        indices = self.frames_indices or ()
        ascends = all(a < b for a, b in itertools.pairwise(indices))
        if indices and not (ascends and 0 <= indices[0] and indices[-1] < 2**31):
            raise refusal("frames_indices must ascend from 0 or more")
        if indices and self.total_num_frames is not None and self.total_num_frames <= indices[-1]:
            raise refusal("total_num_frames must be more than the last of frames_indices")
        return self


class MediaLoading(Model):
    """vLLM's media_io_kwargs: the same choice of frames under its other name."""

    video: VideoLoading = VideoLoading()
