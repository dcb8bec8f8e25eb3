"""Prints the dependencies in pyproject.toml: ``python requirements.py PYPROJECT [EXTRA ...]``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the dependencies and those of the extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = [project["optional-dependencies"][extra] for extra in extras]
    return [line for group in (project["dependencies"], *groups) for line in group]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])) + "\n")
