"""What child processes need of this one."""

from __future__ import annotations

import os
from pathlib import Path


def importing_environment() -> dict[str, str]:
    """This process's environment, in which a child imports the same hippo."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
