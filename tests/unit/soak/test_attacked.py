"""What counts as a broken promise beside an attacker, and what an attacker counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.soak.attacker import Aim, Attacker
from tests.soak.promises import QUIET, SERVICES, problems, table

LIMITS = {"gateway": 4000.0, "draft": 4000.0, "target": 8000.0}


def _phase(name: str, **changes: Any) -> dict[str, Any]:
    phase = {
        "name": name,
        "num_answers": 3,
        "seconds": {"video": [1.0, 2.0], "text": [0.5]},
        "faults": [],
        "resident_mb": dict.fromkeys(SERVICES, 900.0),
        "num_tracebacks": 0,
        "ended": [],
        "attacker": None,
        "recovered_s": 0.4,
    }
    return {**phase, **changes}


def _result(**changes: Any) -> dict[str, Any]:
    got = {"outcomes": {"400": 7}, "broken": [], "cpu_s": 1.5}
    phases = [_phase(QUIET), _phase("gif", **{"attacker": got, **changes}), _phase(QUIET)]
    return {"limits_mb": LIMITS, "phases": phases}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"seconds": {"video": [4.2], "text": [0.9]}},
            "4.20 s for a question about a video, 2.1 times the quiet worst",
        ),
        ({"seconds": {"video": [1.0]}}, "no question about a text was answered"),
        ({"faults": ["failed: full", "failed: full"]}, "2 × failed: full"),
        (
            {"resident_mb": {**dict.fromkeys(SERVICES, 1.0), "draft": 4100.0}},
            "the draft had 4,100 MB; its limit is 4,000 MB",
        ),
        ({"ended": ["target"]}, "the target ended"),
        ({"num_tracebacks": 1}, "1 × a traceback in the services' logs"),
        ({"recovered_s": None}, "not as fast as before within 60 s"),
        (
            {"attacker": {"outcomes": {"500": 2}, "broken": ["it tells"], "cpu_s": 0.1}},
            "it tells\n2 × status 500, a fault of the server",
        ),
    ],
)
def test_each_thing_that_must_not_be_is_a_problem(changes: dict[str, Any], found: str) -> None:
    assert problems(_result()) == []
    assert problems(_result(**changes)) == [f"gif: {line}" for line in found.splitlines()]


def test_an_attack_is_compared_with_the_quiet_time_on_both_sides_of_it() -> None:
    slow = {"video": [4.2], "text": [0.9]}
    for place in (0, 2):
        result = _result(seconds=slow)
        result["phases"][place]["seconds"] = {"video": [2.2], "text": [0.5]}
        assert problems(result) == []


def test_the_table_has_a_row_for_each_phase() -> None:
    columns, rows = table(_result(faults=["failed: full"]))
    assert [row[0] for row in rows] == [QUIET, "gif"]
    assert rows[0][1] == "3, 3"
    shown = dict(zip(columns, rows[1], strict=True))
    assert shown["answers, equal"] == "3, 2"
    assert shown["video: median, worst s (×)"] == "1.50, 2.00 (1.0)"
    assert shown["draft, MB of 4,000"] == "900"
    assert (shown["attacker's processor s"], shown["attacker's replies"]) == ("1.5", "7 400")
    assert all(len(row) == len(columns) for row in rows)


async def test_an_attacker_counts_what_comes_back() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.read(1 << 16)).startswith(b"POST"):  # a refusal before the body's end
            writer.write(b"HTTP/1.1 413 Too Large\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        at = Attacker(Aim("gif", host, port, "own", "victim", {}))
        assert (await at.post("/x", bytes(8_000_000))).startswith(b"HTTP/1.1 413")
        await at.post("/x", b"", leaves_after_s=0.0)
        opened = asyncio.create_task(at.keep_open([b"GET / HTTP/1.1\r\n"]))
        while not at.outcomes["closed"]:
            await asyncio.sleep(0.01)
        opened.cancel()
    assert at.outcomes == {"413": 1, "left": 1, "opened": 1, "closed": 1}
