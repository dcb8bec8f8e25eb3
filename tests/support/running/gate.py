"""A hook of a toy model that stops the device where a test wants it."""

import threading
from typing import Any


class Gate:
    """Holds the device thread at the n-th call until it is opened; other calls pass."""

    def __init__(self, num_calls: int = 1) -> None:
        self._num_calls = num_calls
        self._is_open = threading.Event()
        self.has_arrived = threading.Event()

    def __call__(self, _: Any) -> None:
        self._num_calls -= 1
        if self._num_calls == 0:
            self.has_arrived.set()
            assert self._is_open.wait(60)

    def open(self) -> None:
        """Lets the thread go on."""
        self._is_open.set()
