"""Which event loop the processes run on."""

from __future__ import annotations

import asyncio
import sys

import pytest

from hippo import event_loop


async def _running() -> str:
    return type(asyncio.get_running_loop()).__module__


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop for Windows")
def test_it_is_uvloop_s_where_it_is_installed() -> None:
    assert event_loop.run(_running()).startswith("uvloop")


def test_it_is_asyncio_s_where_uvloop_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # its import fails
    assert event_loop.run(_running()).startswith("asyncio")
