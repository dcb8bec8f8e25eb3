"""Command lines of the benchmarks, and the files of their results."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base.environment import ROOT, describe_environment


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser for ``python -m MODULE``; its help keeps the description's line breaks."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def names(text: str) -> list[str]:
    """Parses a comma-separated list."""
    return [part for part in text.split(",") if part]


def integers(text: str) -> list[int]:
    """Parses a comma-separated list of integers."""
    return [int(part) for part in names(text)]


def numbers(text: str) -> list[float]:
    """Parses a comma-separated list of numbers."""
    return [float(part) for part in names(text)]


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --out, by default the file ``name`` of bench/out; parsing it makes the file's folder."""
    parser.add_argument("--out", type=_file, default=str(ROOT / "bench/out" / name))


def new_result(module: str, argv: Sequence[str] | None, **facts: Any) -> dict[str, Any]:
    """Returns the command and the environment of a measurement, and ``facts``.

    ``argv`` are the arguments of ``python -m MODULE``; None: the arguments of this process.
    """
    command = shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])
    return {"command": command, "environment": describe_environment(), **facts}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as JSON."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _file(text: str) -> Path:
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
