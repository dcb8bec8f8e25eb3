"""Parts of documents that programs write, between markers."""

from pathlib import Path


def between_markers(text: str, name: str, body: str) -> str:
    """Returns ``text`` with ``body`` between the markers of ``name``. Raises ValueError if they are
    missing."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{begin.strip()} and {end.strip()} are missing")
    return before + begin + body + end + after


def rewrite(path: Path, name: str, body: str) -> None:
    """Puts ``body`` between the markers of ``name`` in a file. Raises ValueError if they are
    missing."""
    text = between_markers(path.read_text(encoding="utf-8"), name, f"{body}\n")
    path.write_text(text, encoding="utf-8")
