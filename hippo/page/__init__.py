"""The gateway's web page, and recordings of answers: one HTML file with the same modules in it.

The page's files lie beside this module. A recording needs no server and loads nothing: its modules,
its style sheet and its data stand in the file itself.
"""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The modules of a recording; each module imports only from earlier modules.
_REPLAYED = ("dom.js", "run.js", "tokens.js", "timeline.js", "frames.js", "turn.js", "replay.js")
_IMPORT = re.compile(r"^import \{[^}]*\} from \"\./\w+\.js\";\n", re.MULTILINE)
_DATA = "RECORDED-DATA"

PLAYER = "player.html"
"""The page's name of ``player()``."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page's Content-Security-Policy: nothing from elsewhere, no script or style in the HTML."""


def page_file(name: str) -> tuple[bytes, str] | None:
    """Returns a file of the page and its media type; None if the page has no such file."""
    return _files().get(name)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    files = {
        path.name: (path.read_bytes(), _KINDS[path.suffix])
        for path in _FOLDER.iterdir()
        if path.suffix in _KINDS
    }
    return {**files, PLAYER: (player().encode(), _KINDS[".html"])}


def recording(data: dict[str, Any]) -> str:
    """Returns the HTML file that shows ``data``, a recording as hippo/page/replay.js reads it."""
    # In a script element, "</script" and "<!--" would have a meaning.
    return player().replace(_DATA, json.dumps(data).replace("<", "\\u003c"))


@cache
def player() -> str:
    """Returns the HTML of a recording with a mark, RECORDED-DATA, in place of its data.

    Its Content-Security-Policy allows only this script and this style, by their hashes.
    """
    script = "\n".join(_inlined((_FOLDER / name).read_text("utf-8")) for name in _REPLAYED)
    style = (_FOLDER / "page.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    frame = (_FOLDER / "replay.html").read_text("utf-8")
    return frame.replace("POLICY", policy).replace("STYLE", style).replace("SCRIPT", script)


def _inlined(module: str) -> str:
    """Returns a module without its imports and exports, as a part of one script."""
    return re.sub(r"^export ", "", _IMPORT.sub("", module), flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
