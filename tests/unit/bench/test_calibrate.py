"""The calibration's order and sums, with steppers that tell their own times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.calibrate import ROWS, measure, measure_blocks
from bench.calibration import Rounds, calibration_of, read_calibrations

DELAYS = {"idle": [0.1, 0.1, 5.0], "busy": [0.1, 1.1, 3.1, 0.2]}


class FakeStepper:
    """A step takes a millisecond a row, a fourth more while the other one steps, and two more at
    once behind steps of the other one, where it has not settled."""

    def __init__(self) -> None:
        self.other: FakeStepper | None = None
        self.rows = 0
        self.is_cold = False

    def begin(self, rows: int, _seconds: float, settle_s: float = 0.0) -> None:
        assert self.rows == 0, "still stepping"
        self.rows = rows
        self.is_cold = self.is_cold and not settle_s

    def end(self) -> float:
        assert self.other is not None
        took = self.rows * (1.25 if self.other.rows else 1.0)
        if self.is_cold:
            took += 2.0
        self.is_cold, self.other.is_cold = False, True
        self.rows = 0
        return took


def rounds() -> Rounds:
    target, draft = FakeStepper(), FakeStepper()
    target.other, draft.other = draft, target
    return measure({"target": target, "draft": draft}, num_rounds=2, seconds=0.001)


def test_steps_are_timed_alone_and_beside_each_other() -> None:
    found = calibration_of(rounds(), DELAYS)
    assert found.contention == {"target": pytest.approx(0.25), "draft": pytest.approx(0.25)}
    assert dict(found.cold_ms["target"]) == pytest.approx(dict.fromkeys((1, 4, 8, 16, 32), 2.0))
    # The draft had rested for 3, 6, 10, 18 and 34 ms; what is told is for 16.
    expected = sum(2 * 16 / rest_ms for rest_ms in (3, 6, 10, 18, 34)) / 5
    assert dict(found.cold_ms["draft"]) == {5: pytest.approx(expected)}
    for side in ("target", "draft"):
        assert found.step_ms[side] == tuple((rows, rows) for rows in ROWS[side])


def test_messages_are_late_that_wait_longer_than_on_an_idle_core() -> None:
    found = calibration_of(rounds(), DELAYS)
    assert found.late_share == pytest.approx(0.5)
    assert found.late_ms == pytest.approx(2.0)


class FakeEnd:
    """A step takes 20 ms, and a fifth of a millisecond more for each block of every millisecond,
    three quarters of it waiting for its core."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_busy = False
        self.waited_ms = 0.0

    def begin(self, _rows: int, _seconds: float, settle_s: float = 0.0) -> None:
        assert settle_s > 0

    def end(self) -> float:
        took = 20 / (1 - 0.2) if self.is_busy else 20.0
        self.waited_ms = 0.5 + 0.75 * (took - 20.0)
        return took


class FakeRelay:
    """Says when the first block has arrived, and when the last one is sent."""

    def __init__(self, ends: Mapping[str, FakeEnd]) -> None:
        self.ends = ends
        self.num_said = 0

    def send(self, message: list[float]) -> None:
        assert message[:2] == [self.ends["draft"].port, self.ends["target"].port]

    def receive(self) -> None:
        self.num_said += 1
        for end in self.ends.values():
            end.is_busy = self.num_said % 2 == 1


def test_what_a_block_takes_is_told_from_steps_with_and_without() -> None:
    ends = {"target": FakeEnd(50_051), "draft": FakeEnd(50_052)}
    blocks_ms = measure_blocks(ends, FakeRelay(ends), num_rounds=3, seconds=0.1)
    for side in ends:
        assert blocks_ms[side] == [pytest.approx([0.2, 0.15])] * 3
    found = calibration_of(rounds(), DELAYS, blocks_ms)
    assert found.block_ms == pytest.approx(0.2)
    assert found.draft_disturbance == pytest.approx(1 / 3)
    noise = {"target": [[-0.1, 0.0]], "draft": [[0.1, 0.2]]}
    found = calibration_of(rounds(), DELAYS, noise)
    assert (found.block_ms, found.draft_disturbance) == (0.0, 0.0)
    found = calibration_of(rounds(), DELAYS)
    assert (found.block_ms, found.draft_disturbance) == (None, 0.0)


def write(path: Path, found: Rounds, *blocks_ms: float) -> Path:
    document = {"dtype": "float32", "rounds_ms": found, "delays_ms": DELAYS}
    blocks = {"target": [[took, 0.0] for took in blocks_ms], "draft": [[0.3, 0.2]]}
    path.write_text(json.dumps({**document, "blocks_ms": blocks}))
    return path


def test_several_calibrations_are_one_of_all_their_rounds(tmp_path: Path) -> None:
    slow = {
        side: {
            kind: {rows: [2 * took for took in values] for rows, values in by_rows.items()}
            for kind, by_rows in kinds.items()
        }
        for side, kinds in rounds().items()
    }
    paths = [
        write(tmp_path / "fast.json", rounds(), 0.1),
        write(tmp_path / "slow.json", slow, 0.2, 0.3),
    ]
    found = read_calibrations(paths, "float32")
    assert dict(found.step_ms["target"]) == pytest.approx(
        {rows: 1.5 * rows for rows in ROWS["target"]}
    )
    assert found.contention["draft"] == pytest.approx(0.25)
    assert dict(found.cold_ms["target"])[8] == pytest.approx(3.0)
    assert found.block_ms == pytest.approx(0.2)
    assert found.draft_disturbance == pytest.approx(0.5)
    assert found.late_share == pytest.approx(0.5)


def test_a_calibration_of_another_dtype_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "calibration.json", rounds(), 0.1)
    assert read_calibrations([path], "float32").step_ms["draft"][0] == (1.0, 1.0)
    with pytest.raises(ValueError, match="not in bfloat16"):
        read_calibrations([path], "bfloat16")
