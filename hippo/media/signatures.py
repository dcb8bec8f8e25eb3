"""What a file is by its first bytes, to say it in errors."""

import re

HEAD_BYTES = 512  # that are enough

_ANIMATED = b"[" + b"".join(b"\\x%02x" % flags for flags in range(64) if flags & 2) + b"]"
_IMAGES = (
    (rb"\x89PNG\r\n\x1a\n", "a PNG image"),
    (rb"\xff\xd8\xff", "a JPEG image"),
    (rb"BM.{4}\0\0\0\0", "a BMP image"),
    (rb"II\*\0|MM\0\*", "a TIFF image"),
    (rb"RIFF.{4}WEBPVP8X.{4}" + _ANIMATED, "an animated WebP"),
    (rb"RIFF.{4}WEBP", "a WebP image"),
    (rb".{4}ftyp(?:avif|mif1.{4}(?:.{4})*avif)", "an AVIF image"),
    (rb".{4}ftyp(?:hei[cxms]|mif1)", "a HEIC image"),
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
    (rb"\s*<(?:!doctype html|html)", "an HTML page"),
    (rb"\s*[{\[]\s*[\"{\[\]}]", "JSON"),
    (rb"data:[\w/+.-]*[;,]", "the text of a data: URL"),
)


def image_kind(head: bytes) -> str | None:
    """Returns what an image is, such as "a PNG image"; None if it is none that is known."""
    return _first(_IMAGES, head)


def is_video(head: bytes) -> bool:
    """Whether a file is a video that is known, and no GIF, which is an image as well."""
    kind = None if image_kind(head) else _first(_VIDEOS, head)
    return kind not in (None, "a GIF")


def fault(head: bytes, noun: str, readable: str) -> str:
    """Returns what is wrong with a file that cannot be read as a ``noun`` ("video", "image"), of
    which ``readable`` are the kinds that can."""
    own, others = (_VIDEOS, _IMAGES) if noun == "video" else (_IMAGES, _VIDEOS)
    if (kind := _first(own, head)) and kind not in _UNREADABLE:
        return f"this is {kind} that is damaged or cut off; send it whole"
    kind = kind or _first((*others, *_OTHERS), head)
    what = f"{kind}, not" if kind else "not"
    article = "an" if noun == "image" else "a"
    return f"this is {what} {article} {noun} that can be read; send {readable}"


_UNREADABLE = ("a HEIC image", "an SVG drawing")


def _first(signatures: tuple[tuple[bytes, str], ...], head: bytes) -> str | None:
    for pattern, name in signatures:
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return name
    return None
