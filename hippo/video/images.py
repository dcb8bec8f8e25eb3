"""Decodes images to RGB frames with Pillow, inside the worker process."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from hippo.errors import MediaError
from hippo.types import FramePlan
from hippo.video.frame_list import read_frame_list
from hippo.video.limits import DecodeLimits
from hippo.video.sampling import TEMPORAL_PATCH_SIZE

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int, int, int], Pixels]  # (num_frames, height, width) -> [..., 3]

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, slots=True)
class Frames:
    """RGB frames (uint8 ``[num_frames, height, width, 3]``) and their times in seconds."""

    pixels: Pixels
    seconds: tuple[float, ...]
    sampled_fps: float


def read_image(file: BinaryIO, limits: DecodeLimits, allocate: Allocate) -> Frames:
    """Returns the image as one frame, turned by its EXIF orientation; raises MediaError."""
    file.seek(0)
    rgb = _rgb(file, _FORMATS, limits, "the image")
    pixels = allocate(1, rgb.shape[0], rgb.shape[1])
    pixels[0] = rgb
    return Frames(pixels, (0.0,), 1.0)


def read_frames(
    file: BinaryIO, plan: FramePlan, limits: DecodeLimits, allocate: Allocate
) -> Frames:
    """Returns the images of a frame list (hippo.video.frame_list) as a video's sampled frames.

    If the list has more than ``plan.max_frames`` images, evenly spaced ones are chosen; an odd
    number is filled up with the last image. Raises MediaError for too many frames, and for a frame
    that cannot be read or differs in size from the first.
    """
    listed = read_frame_list(file, file.seek(0, io.SEEK_END))
    total = len(listed.spans)
    if total > limits.max_frames:
        raise MediaError(
            f"the video has {total} frames; at most {limits.max_frames} are allowed: send fewer"
        )
    limits.check_duration(listed.duration_s)
    limits.check_rate(total, listed.duration_s)
    num_chosen = min(total, plan.max_frames)
    chosen = [place * total // num_chosen for place in range(num_chosen)]
    num_frames = num_chosen + -num_chosen % TEMPORAL_PATCH_SIZE
    pixels: Pixels | None = None
    for place, index in enumerate(chosen):
        offset, size = listed.spans[index]
        file.seek(offset)
        name = f"frame {index} of the video"
        rgb = _rgb(io.BytesIO(file.read(size)), ("JPEG",), limits, name)
        height, width, _ = rgb.shape
        if pixels is None:
            limits.check_memory(num_frames, width, height)
            pixels = allocate(num_frames, height, width)
        if pixels.shape[1:] != rgb.shape:
            raise MediaError(
                f"{name} has {width} x {height} pixels, frame {chosen[0]} has {pixels.shape[2]} x "
                f"{pixels.shape[1]}; all must be of one size"
            )
        pixels[place] = rgb
    assert pixels is not None
    pixels[num_chosen:] = pixels[num_chosen - 1]
    seconds = [listed.seconds[index] for index in chosen]
    seconds += seconds[-1:] * (num_frames - num_chosen)
    return Frames(pixels, tuple(seconds), num_chosen / listed.duration_s)


def _rgb(file: BinaryIO, formats: tuple[str, ...], limits: DecodeLimits, name: str) -> Pixels:
    """Returns the upright image ``[height, width, 3]``; a MediaError calls it ``name``."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the operator's limit is checked below, before any decoding
    try:
        with Image.open(file, formats=formats) as image:
            limits.check_size(image.width, image.height, name)
            limits.check_memory(1, image.width, image.height)
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except UnidentifiedImageError:
        if formats == _FORMATS:
            raise MediaError(
                "this is not an image that can be read; send a jpeg, png or webp"
            ) from None
        raise MediaError(f"{name} is not a {formats[0].lower()} image that can be read") from None
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of any type for damaged files
        reason = str(error) or type(error).__name__
        raise MediaError(f"{name} is damaged or cut off ({reason}); send it whole") from None
