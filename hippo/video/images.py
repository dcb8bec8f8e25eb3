"""Decodes images to RGB frames with Pillow, inside the worker process."""

import io
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hippo.errors import MediaError
from hippo.media.formats import IMAGES
from hippo.media.frame_list import read_frame_list
from hippo.media.resizing import fit_frames, fit_image, fit_size
from hippo.media.sampling import spaced
from hippo.media.signatures import HEAD_BYTES, fault, is_video
from hippo.types import FramePlan
from hippo.video.canvas import Canvas, ExpensiveError, Frames, Pixels

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)


def read_image(file: BinaryIO, canvas: Canvas) -> Frames:
    """Returns the image as one frame, turned by its EXIF orientation; raises MediaError."""
    rgb = _rgb(file, IMAGES, canvas, "the image")
    size = fit_image(rgb.shape[0], rgb.shape[1], canvas.plan, canvas.frame_limits)
    pixels = canvas.allocate_frames(1, size)
    canvas.draw(rgb, pixels[0])
    return Frames(pixels, (0.0,), 1.0)


def read_frames(file: BinaryIO, canvas: Canvas) -> Frames:
    """Returns the images of a frame list (hippo.media.frame_list) as a video's sampled frames.

    If the list has more images than the plan's ``max_frames`` or ``max_visual_tokens`` allow,
    evenly spaced ones are chosen; the last image is repeated up to a full grid of tokens. Raises
    MediaError for too many frames, and for a frame that cannot be read or differs in size from the
    first.
    """
    listed = read_frame_list(file, file.seek(0, io.SEEK_END))
    total, limits, multiple = len(listed.spans), canvas.limits, canvas.frame_limits.frame_multiple
    if total > limits.max_frames:
        raise MediaError(
            f"the video has {total} frames; at most {limits.max_frames} are allowed: send fewer"
        )
    limits.check_times(total, listed.duration_s)

    def read(index: int) -> Pixels:
        offset, size = listed.spans[index]
        file.seek(offset)
        name = f"frame {index} of the video"
        return _rgb(io.BytesIO(file.read(size)), ("JPEG",), canvas, name)

    first = read(0)
    height, width, _ = first.shape
    num_chosen = min(total, canvas.plan.max_frames)
    num_padded = num_chosen + -num_chosen % multiple
    num_frames = fit_frames(num_padded, height, width, canvas.plan, canvas.frame_limits)
    num_chosen = min(num_chosen, num_frames)
    canvas.check_cost(num_chosen, num_chosen, (width, height))
    chosen = spaced(total, num_chosen)
    size = fit_size(num_frames, height, width, canvas.plan, canvas.frame_limits)
    pixels = canvas.allocate_frames(num_frames, size)
    for place, index in enumerate(chosen):
        rgb = read(index) if index else first
        if rgb.shape != first.shape:
            raise MediaError(
                f"frame {index} of the video has {rgb.shape[1]} x {rgb.shape[0]} pixels, frame 0 "
                f"has {width} x {height}; all must be of one size"
            )
        canvas.draw(rgb, pixels[place])
    pixels[num_chosen:] = pixels[num_chosen - 1]
    seconds = [listed.seconds[index] for index in chosen]
    seconds += seconds[-1:] * (num_frames - num_chosen)
    return Frames(pixels, tuple(seconds), num_chosen / listed.duration_s)


def _rgb(file: BinaryIO, formats: tuple[str, ...], canvas: Canvas, name: str) -> Pixels:
    """Returns the upright image ``[height, width, 3]``; a MediaError calls it ``name``."""
    Image.MAX_IMAGE_PIXELS = None  # the operator's limit is checked below, before any decoding
    try:
        with Image.open(file, formats=formats) as image:
            canvas.limits.check_size(image.width, image.height, name)
            canvas.limits.check_memory(1, image.width, image.height)
            canvas.check_cost(1, 1, image.size)
            return _flattened(ImageOps.exif_transpose(image), _colour(canvas.plan))
    except UnidentifiedImageError:
        if formats == IMAGES:
            file.seek(0)
            head = file.read(HEAD_BYTES)
            if is_video(head):
                raise MediaError("this is a video, not an image; send it as a video") from None
            raise MediaError(fault(head, "image", "a jpeg, png, webp or avif")) from None
        raise MediaError(f"{name} is not a {formats[0].lower()} image that can be read") from None
    except (MediaError, ExpensiveError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of any type for damaged files
        reason = str(error) or type(error).__name__
        raise MediaError(f"{name} is damaged or cut off ({reason}); send it whole") from None


def _colour(plan: FramePlan) -> Colour:
    if not plan.background:
        return WHITE
    red, rest = divmod(plan.background - 1, 1 << 16)
    return (red, *divmod(rest, 1 << 8))


def _flattened(image: Image.Image, background: Colour) -> Pixels:
    """Returns 8-bit RGB of an image of any mode: transparent pixels over ``background``, and more
    than 8 bits scaled to 8."""
    if image.has_transparency_data:
        image = over(background, _as_rgba(image))
    elif image.mode.startswith(("I", "F")):
        image = Image.fromarray(_in_8_bits(image))
    return np.asarray(image.convert("RGB"))


def over(background: Colour, image: Image.Image) -> Image.Image:
    opaque = Image.new("RGB", image.size, background)
    opaque.paste(image, mask=image.getchannel("A"))
    return opaque


def _as_rgba(image: Image.Image) -> Image.Image:
    """Converts as Image.convert, but right also for 16-bit images with one transparent colour."""
    key = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        rgba = Image.fromarray(_in_8_bits(image)).convert("RGBA")
        rgba.putalpha(Image.fromarray(np.where(np.asarray(image) == key, 0, 255).astype(np.uint8)))
        return rgba
    if isinstance(key, tuple) and max(key) > 255:  # Pillow has kept the high bytes of the pixels
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image.convert("RGBA")


def _in_8_bits(image: Image.Image) -> Pixels:
    """Scales an image of one channel: 16 bits by their range, floats by 0 to 1, and what exceeds
    that between the least and the greatest value."""
    values = np.asarray(image).astype(np.float64)
    least, most = 0.0, 65535.0 if image.mode.startswith("I;16") else 1.0
    if image.mode == "I" or values.min() < least or values.max() > most:
        least, most = values.min(), values.max()
    scaled = (values - least) * (255 / max(most - least, 1e-9))
    return np.nan_to_num(scaled).round().clip(0, 255).astype(np.uint8)
