"""Command lines of the benchmarks."""

from __future__ import annotations

import argparse


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
