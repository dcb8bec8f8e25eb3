"""What is counted on the draft's core, told apart by what a round holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.core_work import CoreWork, core_work_of, read_core_work


def round_of(system: str, num_blocks: float, num_tokens: float) -> dict[str, Any]:
    """A message takes 0.3 ms, a verdict 0.2 and a token of it 0.02."""
    has_draft = system != "target-only"
    work_ms = 0.3 * (num_blocks + has_draft) + 0.2 + 0.02 * num_tokens
    return {
        "system": system,
        "blocks_per_round": num_blocks,
        "tokens_per_round": num_tokens,
        "cores": {
            "draft": {
                "draft device": 5.0,
                "idle": 7.0,
                "gateway loop": 0.75 * work_ms,
                "client loop": 0.25 * work_ms,
            }
        },
    }


ROUNDS = [
    round_of("target-only", 0.0, 1.0),
    round_of("serial γ=3", 1.0, 3.9),
    round_of("serial γ=30", 1.1, 25.0),
]


def test_messages_verdicts_and_tokens_are_told_apart() -> None:
    found = core_work_of(ROUNDS)
    assert (found.message_ms, found.verdict_ms) == pytest.approx((0.3, 0.2))
    assert found.token_ms == pytest.approx(0.02)


def write(path: Path, rounds: list[dict[str, Any]], dtype: str = "float32") -> Path:
    path.write_text(json.dumps({"dtype": dtype, "systems": rounds}))
    return path


def test_only_the_policy_that_is_learnt_from_and_its_baseline_count(tmp_path: Path) -> None:
    other = round_of("adaptive", 1.2, 14.0)
    other["cores"]["draft"]["gateway loop"] *= 3
    paths = [write(tmp_path / "1.json", [*ROUNDS, other]), write(tmp_path / "2.json", ROUNDS)]
    found = read_core_work(paths, "float32", "serial")
    assert isinstance(found, CoreWork)
    assert found.message_ms == pytest.approx(0.3)


def test_rounds_that_do_not_say_it_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rounds.json", ROUNDS)
    with pytest.raises(ValueError, match="not in bfloat16"):
        read_core_work([path], "bfloat16", "serial")
    with pytest.raises(ValueError, match="there must be rounds of target-only and of vpsd"):
        read_core_work([path], "float32", "vpsd")
    alone = write(tmp_path / "alone.json", ROUNDS[1:])
    with pytest.raises(ValueError, match="there must be rounds of target-only"):
        read_core_work([alone], "float32", "serial")
