"""The calibration's order and sums, with steppers that tell their own times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.calibrate import ROWS, calibration_of, measure, read_calibration

DELAYS = {"idle": [0.1, 0.1, 5.0], "busy": [0.1, 1.1, 3.1, 0.2]}


class FakeStepper:
    """A step takes a millisecond a row, a fourth more while the other one steps, and half a
    millisecond more at once behind steps of the other one."""

    def __init__(self) -> None:
        self.other: FakeStepper | None = None
        self.rows = 0
        self.is_cold = False
        self.is_median = False  # of many steps

    def begin(self, rows: int, seconds: float) -> None:
        assert self.rows == 0, "still stepping"
        self.rows, self.is_median = rows, seconds > 0

    def end(self) -> float:
        assert self.other is not None
        took = self.rows * (1.25 if self.other.rows else 1.0)
        if self.is_cold and not self.is_median:
            took += 0.5
        self.is_cold, self.other.is_cold = False, True
        self.rows = 0
        return took


def sides() -> dict[str, dict[str, dict[str, float]]]:
    target, draft = FakeStepper(), FakeStepper()
    target.other, draft.other = draft, target
    return measure({"target": target, "draft": draft}, num_rounds=2, seconds=0.001)


def test_steps_are_timed_alone_and_beside_each_other() -> None:
    found = calibration_of(sides(), DELAYS)
    assert found.contention == {"target": pytest.approx(0.25), "draft": pytest.approx(0.25)}
    assert found.cold_ms == {"target": pytest.approx(0.5), "draft": pytest.approx(0.5)}
    for side in ("target", "draft"):
        assert found.step_ms[side] == tuple((rows, rows) for rows in ROWS[side])


def test_messages_are_late_that_wait_longer_than_on_an_idle_core() -> None:
    found = calibration_of(sides(), DELAYS)
    assert found.late_share == pytest.approx(0.5)
    assert found.late_ms == pytest.approx(2.0)


def test_a_calibration_of_another_dtype_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"dtype": "float32", "sides": sides(), "delays_ms": DELAYS}))
    assert read_calibration(path, "float32").step_ms["draft"][0] == (1.0, 1.0)
    with pytest.raises(ValueError, match="not in bfloat16"):
        read_calibration(path, "bfloat16")
