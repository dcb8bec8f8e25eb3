"""Draws the kept visual tokens: a row per strategy, a column per frame. Needs Pillow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

_FRAME_PIXELS = 176  # approximate width of a frame
_LEAST_TOKEN_PIXELS = 5
_LABEL_PIXELS = 210
_GAP, _MARGIN, _HEAD = 8, 18, 74
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 36, 40), (110, 116, 122)
_KEPT = (208, 62, 24)  # outline of kept tokens
_LOW, _MIDDLE, _HIGH = (255, 252, 236), (236, 134, 47), (90, 20, 10)  # colours of scores
_FADED = 0.22  # how much of a dropped token's grey remains


@dataclass(frozen=True, slots=True)
class PictureRow:
    """A row of the picture. ``values`` ``[frames, rows, columns]`` are drawn over the frames: the
    kept tokens of a strategy (bool), or a score from 0 to 1 within each frame (float)."""

    title: str
    notes: tuple[str, ...]
    values: torch.Tensor


def draw(
    *,
    title: str,
    subtitle: str,
    frames: torch.Tensor,
    seconds: Sequence[float],
    rows: Sequence[PictureRow],
) -> Image.Image:
    """Returns a picture with the frames in its first row, and then ``rows``.

    ``frames`` is uint8 ``[num_frames, height, width, 3]``, one for each frame of the rows'
    grids, in the size and shape in which the model sees them (a model of square frames distorts a
    wide clip); ``seconds`` are their times.
    """
    _, grid_rows, grid_columns = rows[0].values.shape
    token = max(_LEAST_TOKEN_PIXELS, round(_FRAME_PIXELS / grid_columns))
    size = (grid_columns * token, grid_rows * token)
    images = [
        Image.fromarray(frame.numpy()).resize(size, Image.Resampling.LANCZOS) for frame in frames
    ]
    width = 2 * _MARGIN + _LABEL_PIXELS + len(images) * (size[0] + _GAP)
    height = _HEAD + 22 + (1 + len(rows)) * (size[1] + _GAP) + _MARGIN
    page = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((_MARGIN, _MARGIN - 4), title, _INK, _font(20))
    pen.text((_MARGIN, _MARGIN + 24), subtitle, _FAINT, _font(14))
    lefts = [_MARGIN + _LABEL_PIXELS + index * (size[0] + _GAP) for index in range(len(images))]
    for left, second in zip(lefts, seconds, strict=True):
        pen.text((left, _HEAD), f"{second:.1f} s", _FAINT, _font(13))
    top = _HEAD + 22
    notes = (
        f"{grid_rows} x {grid_columns} tokens a frame,",
        f"seen at {frames.shape[2]} x {frames.shape[1]} pixels",
    )
    _label(pen, top, "the clip", notes)
    for left, image in zip(lefts, images, strict=True):
        page.paste(image, (left, top))
    for row in rows:
        top += size[1] + _GAP
        _label(pen, top, row.title, row.notes)
        for index, (left, image) in enumerate(zip(lefts, images, strict=True)):
            values = row.values[index]
            is_kept = values.dtype == torch.bool
            drawn = _marked(image, values, token) if is_kept else _heat(image, values)
            page.paste(drawn, (left, top))
    return page


def _label(pen: ImageDraw.ImageDraw, top: int, title: str, notes: Sequence[str]) -> None:
    pen.text((_MARGIN, top + 2), title, _INK, _font(17))
    for index, note in enumerate(notes):
        pen.text((_MARGIN, top + 26 + 18 * index), note, _FAINT, _font(13))


def _marked(image: Image.Image, kept: torch.Tensor, token: int) -> Image.Image:
    """Returns the frame with kept tokens in colour and outlined, and the others faded."""
    grey = image.convert("L").point(lambda value: round(_FADED * value + (1 - _FADED) * 244))
    mask = Image.fromarray(kept.to(torch.uint8).mul(255).numpy(), "L")
    mask = mask.resize(image.size, Image.Resampling.NEAREST)
    marked = Image.composite(image, grey.convert("RGB"), mask)
    pen = ImageDraw.Draw(marked)
    for row, column in kept.nonzero().tolist():
        left, top = column * token, row * token
        pen.rectangle((left, top, left + token - 1, top + token - 1), outline=_KEPT)
    return marked


def _heat(image: Image.Image, score: torch.Tensor) -> Image.Image:
    """Returns the frame in grey with the scores ``[rows, columns]`` as colours over it."""
    grey = Image.fromarray(score.float().clamp(0, 1).mul(255).to(torch.uint8).numpy(), "L")
    heat = ImageOps.colorize(grey, black=_LOW, mid=_MIDDLE, white=_HIGH)
    heat = heat.resize(image.size, Image.Resampling.NEAREST)
    return Image.blend(image.convert("L").convert("RGB"), heat, 0.8)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
