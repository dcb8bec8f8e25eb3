"""Prints the dependencies in pyproject.toml: ``python requirements.py PYPROJECT [EXTRA ...]``."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the dependencies and those of the extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    own = re.compile(rf"{re.escape(project['name'])}\[([\w,-]+)\]")

    def lines_of(extra: str) -> Iterator[str]:
        for line in project["optional-dependencies"][extra]:
            if others := own.fullmatch(line):
                for other in others[1].split(","):
                    yield from lines_of(other)
            else:
                yield line

    lines = [line for extra in extras for line in lines_of(extra)]
    return list(dict.fromkeys([*project["dependencies"], *lines]))


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])) + "\n")
