"""``hippo simulate`` as a user calls it."""

import json
from pathlib import Path

import pytest

from hippo.cli import main

QUICK = ["simulate", "--num-traces", "2", "--tokens", "60", "--policies", "serial:4,adaptive"]


def test_a_pair_is_predicted_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = tmp_path / "out.json"
    assert main([*QUICK, "--pair", "qwen-7b-72b-nf4", "--json", str(goal)]) == 0
    shown = capsys.readouterr().out
    assert "Qwen2.5-VL 7B / 72B" in shown and "40 layers on a helper" in shown
    assert "without any overhead" in " ".join(shown.split())
    found = json.loads(goal.read_text())
    assert [row["policy"] for row in found["policies"]] == ["serial γ=4", "adaptive"]
    serial, adaptive = (row["efficiency"] for row in found["policies"])
    assert all(row["helped_speedup"] > row["end_to_end_speedup"] for row in found["policies"])
    assert 0 < serial <= 1.02
    assert 0 < adaptive <= 1.1  # with other delays it chooses other paces, at times better ones


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--pair", "qwen-1b-2b"], "choose one of qwen-7b-72b"),
        (["--pair", "qwen-7b-72b", "--target-gpus", "1"], "take 2 or more"),
        (["--pair", "qwen-7b-72b", "--target-ms", "3"], "give one machine"),
        (["--target-ms", "3"], "go together"),
        (["--target-ms", "3", "--draft-ms", "1", "--gpu", "h100"], "is about a --pair"),
        (["--acceptance", "1.5"], "0 to 1"),
        (["--run-length", "0.5"], "1 or more"),
        (["--traces", "nowhere.jsonl"], "drawn answers"),
        (["--delay-ms", "-1"], "--delay-ms must be 0 to"),
        (["--target-gpus", "0"], "--target-gpus must be 1 to"),
        (["--target-ms", "20", "--draft-ms", "2", "--row-ms", "-1"], "--row-ms must be 0 to"),
    ],
)
def test_bad_input_ends_with_what_would_be_right(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *arguments]) == 1
    assert part in " ".join(capsys.readouterr().err.split())
