"""Fuzzing in small, always with the same inputs; ``python -m tests.fuzz`` does it in large."""

import pytest

from tests.fuzz.__main__ import main, run
from tests.fuzz.findings import Findings
from tests.fuzz.mutate import generator, mutated
from tests.fuzz.streams import script


@pytest.mark.parametrize(
    ("name", "num_inputs"), [("media", 1000), ("draft-stream", 300), ("target-stream", 300)]
)
def test_nothing_that_strangers_send_does_harm(name: str, num_inputs: int) -> None:
    findings = run(name, num_inputs, 2026, lambda: None)
    assert findings.failures == []
    assert findings.outcomes.total() == num_inputs
    assert len(findings.outcomes) >= 3  # the inputs differ in what they come to
    assert findings.figures["processes left"] == 0


def test_an_input_can_be_made_again_from_its_number() -> None:
    data, others = bytes(range(256)) * 4, [b"other"]
    first = [mutated(generator(3, number), data, others) for number in range(50)]
    assert first == [mutated(generator(3, number), data, others) for number in range(50)]
    assert len(set(first)) == 50
    for name in ("draft-stream", "target-stream"):
        assert script(generator(3, 9), name) == script(generator(3, 9), name)


def test_failures_are_shown_and_end_a_run_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Findings:
        findings = Findings(0)
        findings.fail(3, "it broke")
        return findings

    monkeypatch.setattr("tests.fuzz.__main__.run", broken)
    with pytest.raises(SystemExit):
        main(["media", "--inputs", "1"])
    assert "it broke" in capsys.readouterr().out
