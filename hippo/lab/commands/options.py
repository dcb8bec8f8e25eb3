"""Checks of options that several commands share, and the files that they write."""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from hippo.errors import InvalidRequestError


def flag_of(name: str) -> str:
    """Returns the option of an argument, such as ``--max-tokens``."""
    return "--" + name.replace("_", "-")


def check_range(
    arguments: argparse.Namespace, least: float, *names: str, most: float = math.inf
) -> None:
    """Raises InvalidRequestError for an option that is given and not within the range."""
    right = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:g}"
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise InvalidRequestError(f"{flag_of(name)} must be {right}")


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidRequestError for an option that is given and not above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise InvalidRequestError(f"{flag_of(name)} must be above 0")


def refuse(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises InvalidRequestError, ``why`` behind the option, for the first that is given."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise InvalidRequestError(f"{flag_of(name)} {why}")


def check_folders(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidRequestError for an option with a file whose folder is not there; "-" is
    standard output."""
    for name in names:
        path = getattr(arguments, name)
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise InvalidRequestError(f"{flag_of(name)}: there is no folder {Path(path).parent}")


def write_text(path: Path, text: str) -> None:
    """Writes a file of results. Raises InvalidRequestError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from None
