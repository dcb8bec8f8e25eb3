"""Checks that hold after every integration test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_engine_thread_is_left() -> Iterator[None]:
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread.name == "device" or thread.name.startswith("prepare")
    ]
    assert not left, f"threads outlived their service: {left}"
