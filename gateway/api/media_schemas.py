"""The fields of a request that concern videos and images: their sources and frame sampling."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from gateway.api.neutral import PART, Neutral
from hippo.errors import InvalidRequestError
from hippo.types import MediaKind

MAX_PIXELS = 2**31 - 1
MAX_UUID_LENGTH = 256


def refusal(message: str) -> PydanticCustomError:
    # pydantic formats the message as a template, so braces in it must come in as a value.
    return PydanticCustomError("unsupported", "{text}", {"text": message})


def refusal_of(field: str, why: str) -> PydanticCustomError:
    """Returns the error of a field of the model that is validated."""
    context = {"field": field, "why": why}
    return PydanticCustomError("unsupported_field", "{field} {why}", context)


def _no_truth_value(value: Any) -> Any:
    """pydantic would take true for 1."""
    if isinstance(value, bool):
        raise refusal(f"expected a number, not {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]


def field_error(field: str, why: str) -> InvalidRequestError:
    """Returns the error of a field, by its path, of a request that was validated."""
    return InvalidRequestError(f"{field} {why}", param=field)


class Model(BaseModel):
    """A part of a request. Fields that have no effect are in ``neutral``; an unknown field is
    refused, unless its value is one of ``absent``, which clients send for what nobody has set."""

    # Only of a constrained text pydantic checks that it is Unicode: half of a surrogate pair has no
    # UTF-8 form, which tokenizers, gRPC and error messages need.
    model_config = ConfigDict(
        extra="forbid", frozen=True, str_min_length=0, use_attribute_docstrings=True
    )
    absent: ClassVar[list[Any]] = [None]
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    def given(self, *names: str) -> list[str]:
        """Returns which of the fields are set."""
        return [name for name in names if getattr(self, name) is not None]

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_changes_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, given in value.items():
            if name in cls.neutral:
                if not cls.neutral[name].takes(given):
                    raise refusal_of(name, cls.neutral[name].refusal(given))
            elif name in known or given not in cls.absent:
                kept[name] = given
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        described["additionalProperties"] = {"enum": cls.absent}
        properties = described.setdefault("properties", {})
        for name, field in cls.neutral.items():
            allowed = {} if field.values is None else {"enum": [None, *field.values]}
            properties[name] = {**allowed, "description": f"Inert. {field.why}".strip()}
        return schema


class MediaUrl(Model):
    """The source of a video or image."""

    url: str
    """A data: URL (data:video/mp4;base64,..., or frames as data:video/jpeg;base64,<jpg>,<jpg>,...),
    an http(s) URL of an allowed domain, a path or file:// URL under an allowed directory, or the id
    of an uploaded video (POST /v1/videos)."""
    detail: Literal["auto", "low", "high"] | None = None
    """Inert; frame sizes are set by mm_processor_kwargs."""


class ContentPart(Model):
    """A part of a message: a text, a video or an image."""

    neutral: ClassVar[Mapping[str, Neutral]] = PART

    type: Literal["text", "video_url", "image_url"]
    uuid: str | None = Field(default=None, min_length=1, max_length=MAX_UUID_LENGTH)
    """The client's name of the media item's content: caches use it as key in place of the content.
    The item itself is always needed."""
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
        source, uuid = value.get(kind), value.get("uuid")
        if kind == "text" and uuid is not None:
            raise refusal("a part of type 'text' cannot have the field 'uuid'")
        has_none = source is None or (isinstance(source, dict) and source.get("url") is None)
        if uuid is not None and has_none:
            raise refusal(
                f"a part with a uuid needs its {kind} as well; this server cannot take media from "
                "its caches by uuid alone"
            )
        if source is None:
            raise refusal(f"a part of type {kind!r} needs the field {kind!r}")
        for other in {"text", "video_url", "image_url"} - {kind}:
            if value.get(other) is not None:
                raise refusal(f"a part of type {kind!r} cannot have the field {other!r}")
        if kind != "text" and isinstance(source, str):
            return {**value, kind: {"url": source}}
        return value

    @property
    def media(self) -> tuple[MediaKind, MediaUrl] | None:
        """The kind and source of the part's media item; None for a text."""
        if self.video_url is not None:
            return MediaKind.VIDEO, self.video_url
        if self.image_url is not None:
            return MediaKind.IMAGE, self.image_url
        return None


def _only_rate(value: Any) -> Any:
    """Returns the rate of a list of equal rates, one for each video, as qwen-vl-utils gives them;
    any other value as it is."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise refusal("fps is a list of different rates; all videos of a request have one")
    return value[0]


class FrameSize(Model):
    """Limits of the pixels of a frame or image, with transformers' names."""

    shortest_edge: Int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Another name of min_pixels."""
    longest_edge: Int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    """Another name of max_pixels."""


class MediaProcessing(Model):
    """Sampling of frames from the videos, and the size of frames and images."""

    fps: Annotated[Float | None, BeforeValidator(_only_rate)] = Field(default=None, gt=0, le=120)
    """Frames a second; a list has one rate for all."""
    num_frames: Int | None = Field(default=None, ge=1, le=65536)
    """Number of frames, evenly spaced; excludes fps."""
    min_frames: Int | None = Field(default=None, ge=1, le=65536)
    max_frames: Int | None = Field(default=None, ge=1, le=65536)
    min_pixels: Int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    max_pixels: Int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    size: FrameSize = FrameSize()
    do_sample_frames: StrictBool | None = None
    """False: media_io_kwargs.video alone says which frames are used."""

    @property
    def frame_fields(self) -> list[str]:
        """The given fields that say which frames are sampled."""
        return self.given("fps", "num_frames", "min_frames", "max_frames")

    @model_validator(mode="after")
    def _fields_agree(self) -> "MediaProcessing":
        others = [name for name in self.frame_fields if name != "num_frames"]
        if self.num_frames is not None and others:
            raise refusal(f"num_frames and {others[0]} exclude each other; give one of them")
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            one, other = getattr(self, name), getattr(self.size, edge)
            if None not in (one, other) and one != other:
                raise refusal(f"{name} and size.{edge} differ; give one of them")
        fewest = self.min_pixels or self.size.shortest_edge
        most = self.max_pixels or self.size.longest_edge
        if fewest and most and fewest > most:
            raise refusal(f"min_pixels is {fewest}, more than max_pixels ({most})")
        return self


class VideoLoading(Model):
    """Sampling of frames from a video, with vLLM's names."""

    num_frames: Int | None = Field(default=None, ge=-1, le=65536)
    """Number of frames, evenly spaced; the most frames beside fps; 0 or less: not set."""
    fps: Float | None = Field(default=None, ge=-1, le=120)
    """0 or less: not set."""
    frames_indices: tuple[Int, ...] | None = Field(default=None, min_length=1, max_length=65536)
    """For frames sent as video/jpeg: the frame numbers in the original video, ascending; `fps` is
    the frame rate of that video."""
    total_num_frames: Int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Number of frames of the original video."""
    duration: Float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Duration of that video in seconds."""
    do_sample_frames: Literal[False] | None = None
    """Inert: all frames sent as video/jpeg are used."""

    @model_validator(mode="after")
    def _indices_ascend(self) -> "VideoLoading":
        indices = self.frames_indices or ()
        ascends = all(a < b for a, b in itertools.pairwise(indices))
        if indices and not (ascends and 0 <= indices[0] and indices[-1] < 2**31):
            raise refusal("frames_indices must ascend from 0 or more")
        if indices and self.total_num_frames is not None and self.total_num_frames <= indices[-1]:
            raise refusal("total_num_frames must be more than the last of frames_indices")
        return self


ColourValue = Annotated[Int, Field(ge=0, le=255)]


class ImageLoading(Model):
    """Loading of images, with vLLM's names."""

    image_mode: Literal["RGB"] | None = None
    """Inert."""
    rgba_background_color: tuple[ColourValue, ColourValue, ColourValue] | None = None
    """Red, green and blue behind transparent pixels; default: white."""


class MediaLoading(Model):
    """vLLM's media_io_kwargs, an alternative to mm_processor_kwargs for sampling frames."""

    video: VideoLoading = VideoLoading()
    image: ImageLoading = ImageLoading()
