"""What a file is by its first bytes, to say it in errors."""

from __future__ import annotations

import re

HEAD_BYTES = 512  # that are enough

_IMAGES = (
    (rb"\x89PNG\r\n\x1a\n", "a PNG image"),
    (rb"\xff\xd8\xff", "a JPEG image"),
    (rb"BM.{4}\0\0\0\0", "a BMP image"),
    (rb"II\*\0|MM\0\*", "a TIFF image"),
    (rb"RIFF.{4}WEBPVP8X.{4}[\x02\x03\x12\x13\x22\x23\x32\x33]", "an animated WebP"),
    (rb"RIFF.{4}WEBP", "a WebP image"),
    (rb".{4}ftypavi[fs]", "an AVIF image"),
    (rb".{4}ftyp(?:hei[cxms]|hev[cx]|mif1|msf1)", "a HEIC image"),
    (rb"\s*(?:<\?xml[^>]*>\s*)?<svg", "an SVG drawing"),
)
_VIDEOS = (
    (rb"GIF8[79]a", "a GIF"),
    (rb"RIFF.{4}AVI ", "an AVI video"),
    (rb"\x1a\x45\xdf\xa3", "a Matroska or WebM video"),
    (rb".{4}ftyp(?!M4A )", "an mp4 or mov video"),
)
_OTHERS = (
    (rb"RIFF.{4}WAVE", "a WAV sound"),
    (rb".{4}ftypM4A ", "an M4A sound"),
    (rb"ID3|\xff[\xfb\xf3\xf2]", "an MP3 sound"),
    (rb"fLaC", "a FLAC sound"),
    (rb"%PDF", "a PDF document"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"#EXTM3U", "a playlist (HLS)"),
    (rb"\s*(?:<\?xml[^>]*>\s*)?<MPD", "a playlist (DASH)"),
    (rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype html|html)", "an HTML page"),
    (rb"\s*[{\[]\s*[\"{\[\]}]", "JSON"),
    (rb"data:[\w/+.-]*[;,]", "the text of a data: URL"),
)


def image_kind(head: bytes) -> str | None:
    """Returns what an image is, such as "a PNG image"; None if it is none that is known."""
    return _first(_IMAGES, head)


def mismatch(head: bytes, expected: str) -> str:
    """Returns what a file is that is not as ``expected``, such as "a PDF document, not a video"."""
    kind = _first((*_IMAGES, *_VIDEOS, *_OTHERS), head)
    return f"{kind}, not {expected}" if kind else f"not {expected}"


def is_video(head: bytes) -> bool:
    """Whether a file is a video that is known."""
    return image_kind(head) is None and _first(_VIDEOS, head) is not None


def _first(signatures: tuple[tuple[bytes, str], ...], head: bytes) -> str | None:
    for pattern, name in signatures:
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return name
    return None
