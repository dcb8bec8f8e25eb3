"""The fields of a request that concern videos and images: their sources and frame sampling."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hippo.types import MediaKind


def refusal(message: str) -> PydanticCustomError:
    # pydantic formats the message as a template, so braces in it must come in as a value.
    return PydanticCustomError("unsupported", "{text}", {"text": message})


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MediaUrl(Model):
    """The source of a video or image."""

    url: str = Field(
        description="A data: URL (data:video/mp4;base64,..., or frames as "
        "data:video/jpeg;base64,<jpg>,<jpg>,...), an http(s) URL of an allowed "
        "domain, a path or file:// URL under an allowed directory, or the id of an uploaded "
        "video (POST /v1/videos)."
    )
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="Inert; frame sizes are set by mm_processor_kwargs."
    )


class ContentPart(Model):
    """A part of a message: a text, a video or an image."""

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
        """The kind and source of the part's media item; None for a text."""
        if self.video_url is not None:
            return MediaKind.VIDEO, self.video_url
        if self.image_url is not None:
            return MediaKind.IMAGE, self.image_url
        return None


class MediaProcessing(Model):
    """Sampling of frames from the videos, and their size."""

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
    """Sampling of frames from a video, with vLLM's names."""

    num_frames: int | None = Field(
        default=None, ge=-1, le=65536, description="Most frames; -1: no limit but the server's."
    )
    fps: float | None = Field(default=None, ge=-1, le=120, description="0 or less: not set.")
    frames_indices: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=65536,
        description="For frames sent as video/jpeg: the frame numbers in the original video, "
        "ascending; `fps` is the frame rate of that video.",
    )
    total_num_frames: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Number of frames of the original video."
    )
    duration: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Duration of that video in seconds."
    )
    do_sample_frames: Literal[False] | None = Field(
        default=None, description="Inert: all frames sent as video/jpeg are used."
    )

    @property
    def timing_fields(self) -> tuple[str, ...]:
        """The given fields that set the times of frames sent one by one."""
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
    """vLLM's media_io_kwargs, an alternative to mm_processor_kwargs for sampling frames."""

    video: VideoLoading = VideoLoading()
