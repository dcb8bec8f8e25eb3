"""How often the host asks the device for values."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

_METHODS = ("tolist", "item", "cpu", "__bool__", "__int__")


@contextmanager
def counted_transfers() -> Iterator[list[str]]:
    """Gives the calls of a tensor's methods that copy values to the host and wait for them."""
    calls: list[str] = []

    def noting(name: str) -> "mock._patch[object]":
        original = getattr(torch.Tensor, name)

        def note(*args: object) -> object:
            calls.append(name)
            return original(*args)

        return mock.patch.object(torch.Tensor, name, note)

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(noting(name))
        yield calls
