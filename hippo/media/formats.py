"""What the worker process reads: of all that FFmpeg and Pillow can, what phones, cameras, screen
recorders, editors and the web make. A reader that is left out cannot be attacked.

docs/api.md has the same lists, which a test compares.
"""

# Only containers that hold their media themselves; a playlist could name other files or URLs.
CONTAINERS = {
    "mp4, mov, 3gp": "mov,mp4,3gp,m4v",
    "webm, mkv": "matroska,webm",
    "avi": "avi",
    "mpeg-ts": "mpegts",
    "mpeg": "mpeg,mpegvideo",
    "flv": "flv",
    "asf (wmv)": "asf",
    "ogg": "ogg",
    "gif": "gif",
    "ivf": "ivf",
    "h264 and hevc without a container": "h264,hevc",
}
"""FFmpeg's demuxers by the name that people know."""

CODECS = (
    *("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mpeg1video", "h263"),
    *("mjpeg", "prores", "dnxhd", "cfhd", "dvvideo"),  # cameras and editors
    *("ffv1", "ffvhuff", "huffyuv", "utvideo", "png", "qtrle", "rawvideo", "v210", "gif"),
    *("theora", "flv1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "wmv3", "vc1"),
)
"""FFmpeg's names of the video codecs."""

IMAGES = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Pillow's names of the images."""

_DECODERS = (
    "libdav1d",
    "flv",
    "msmpeg4",
)  # decode av1, flv1 and msmpeg4v3; other decoders have their codec's name

FFMPEG_OPTIONS = {
    "format_whitelist": ",".join(CONTAINERS.values()),
    # What FFmpeg may look at while it opens a file; it would try decoders of sound, too.
    "codec_whitelist": ",".join((*CODECS, *_DECODERS)),
    "protocol_whitelist": "",  # a file names no other
}
"""Options of av.open. What PyAV decodes afterwards they do not limit."""
