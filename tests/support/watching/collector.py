"""What only Python's garbage collector would free."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Keeps whatever is part of a cycle of references.

    A service collects too, but after so many objects, whatever bytes they hold: for minutes not.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living(*kinds: type) -> list[str]:
    """Names of the objects of these classes that there are."""
    return [type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), kinds)]
