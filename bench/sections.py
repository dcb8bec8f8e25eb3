"""Sections of pages in docs/ that are written from measurements."""

from __future__ import annotations

import re
from pathlib import Path


def replace_section(path: Path, name: str, body: str) -> None:
    """Puts ``body`` between ``<!-- NAME: begin -->`` and its end; SystemExit without them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path} has no markers {begin} ... {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text), encoding="utf-8")
