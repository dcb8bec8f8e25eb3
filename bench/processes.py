"""Processes that belong together, as Linux tells them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def session_processes(session_id: int) -> Iterator[Path]:
    """Folders below /proc of a session's processes; reading one that has ended since then is an
    OSError."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may hold spaces: state, parent, group, session, ...
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue  # it has just ended
        if session == session_id:
            yield path
