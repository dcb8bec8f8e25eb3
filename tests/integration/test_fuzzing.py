"""Fuzzing in small, always with the same inputs; ``python -m bench.fuzz`` does it in large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fuzz.__main__ import main, run
from bench.fuzz.findings import Findings
from bench.fuzz.mutate import generator, mutated
from bench.fuzz.streams import script


@pytest.mark.parametrize(
    ("name", "num_inputs"),
    [("media", 1000), ("draft-stream", 300), ("target-stream", 300), ("chat", 1000)],
)
def test_nothing_that_strangers_send_does_harm(name: str, num_inputs: int) -> None:
    findings = run(name, num_inputs, 2026, lambda: None)
    assert findings.failures == []
    assert findings.num_inputs == num_inputs
    assert len(findings.outcomes) >= 3  # the inputs differ in what they come to
    assert findings.figures["processes left"] == 0


def test_an_input_can_be_made_again_from_its_number() -> None:
    data, others = bytes(range(256)) * 4, [b"other"]
    first = [mutated(generator(3, number), data, others) for number in range(50)]
    assert first == [mutated(generator(3, number), data, others) for number in range(50)]
    assert len(set(first)) == 50
    for name in ("draft-stream", "target-stream"):
        assert script(generator(3, 9), name) == script(generator(3, 9), name)


def test_a_run_is_written_and_failures_end_it_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "chat.json"
    main(["chat", "--inputs", "20", "--seed", "5", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["num_inputs"] == sum(written["outcomes"].values()) == 20
    assert written["command"] == f"python -m bench.fuzz chat --inputs 20 --seed 5 --out {out}"
    assert "20 inputs, 0 failures" in capsys.readouterr().out

    def broken(*_: object) -> Findings:
        findings = Findings("chat", 0)
        findings.fail(3, "it broke")
        return findings

    monkeypatch.setattr("bench.fuzz.__main__.run", broken)
    with pytest.raises(SystemExit):
        main(["chat", "--inputs", "1", "--out", str(out)])
    assert json.loads(out.read_text())["failures"] == [{"input": 3, "what": "it broke"}]
