"""Log lines."""

from __future__ import annotations

import logging

import pytest

from hippo.base.logs import setup_logging


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_a_client_sends_makes_no_line_of_its_own(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("gateway", style=style)
        sent = "/\n12:00 ok\r\x1b[2J\u2028\x9b1m\u202e"
        logging.getLogger("a").info("GET %s", sent, extra={"key": "a\nb"})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert told.isascii()
