"""Packages that only some commands need: the extras of pyproject.toml."""

from collections.abc import Iterator
from contextlib import contextmanager

from hippo.errors import HippoError


@contextmanager
def needs_extra(extra: str, what: str, *, or_else: str = "") -> Iterator[None]:
    """Makes a missing package in the imports of its block a HippoError that says what to install.

    ``what`` needs it; ``or_else`` is what the user can do instead. Other errors of an import are
    left as they are, because an installation would not mend them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or "." in error.name:  # a module that an installed package lacks
            raise
        raise HippoError(
            f"{what} needs {error.name}: pip install 'hippo-serve[{extra}]'"
            + (f", or {or_else}" if or_else else "")
        ) from None
