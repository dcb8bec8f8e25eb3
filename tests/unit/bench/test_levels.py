"""What a row of the table of agreement levels says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.drafts.ideal import ideal_speedup, measured_machine, simulated_lines, trace_of
from bench.drafts.levels import best_systems, level
from bench.drafts.weaker import find_draft
from hippo.client.answers import Answer
from hippo.client.latency import TARGET_ONLY, Record
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import PolicyChoice, replay_all
from hippo.lab.simulation.traces import Trace, agreement_trace

MACHINE = Machine(
    name="test",
    target=ForwardTime(one_row_ms=8.0, row_ms=0.1),
    draft=ForwardTime(one_row_ms=1.0),
    leg_ms=0.2,
)


def _verdict(tokens: int, rows: int, *, is_rejection: bool = False) -> dict[str, Any]:
    return _timed(rows, 8.0 + 0.1 * (rows - 1)) | {"tokens": tokens, "is_rejection": is_rejection}


def _timed(rows: int, forward_ms: float) -> dict[str, Any]:
    times = {"at": 0.0, "forward": forward_ms, "wait": 10.0, "between": 0.5}
    return {"tokens": 1, "rows": rows, "is_rejection": False, **times}


def _record(
    clip: str,
    system: str,
    decode_s: float,
    verdicts: list[dict[str, Any]],
    *,
    after: Sequence[int] = (5, 6),
) -> Record:
    count = sum(verdict["tokens"] for verdict in verdicts)
    # The run's fifth token is wrong, and the run goes on with two tokens.
    ids = [*range(4), 99, *after]
    block = {"at": 1.0, "epoch": 0, "start": 0, "tokens": 7, "token_ids": ids, "step": 1.0}
    early = {"at": -1.0, "epoch": 0, "start": 0, "tokens": 0, "token_ids": [], "step": 9.0}
    figures = {
        "timeline_ms": {"verdicts": verdicts, "blocks": [early, block]},
        "timings_ms": {
            "draft_step": None if system == TARGET_ONLY else 1.0,
            "decode": 1e3 * decode_s,
        },
        "mean_run_length": 5.0,
        "mean_tokens_per_forward": 3.0,
    }
    answer = Answer(
        text="text",
        asked_s=0.0,
        piece_s=(0.1, 0.1 + decode_s),
        token_ids=tuple(range(count)),
        figures=figures,
    )
    return Record(clip, system, 0.0, answer, 1.0, 1.1, tuple(range(count)))


def _records() -> list[Record]:
    alone = [_verdict(1, 50), *[_verdict(1, 1)] * 9]
    together = [_verdict(1, 50), _verdict(4, 6, is_rejection=True), _verdict(5, 5)]
    return [
        record
        for clip, factor in (("a", 1.0), ("b", 2.0))
        for record in (
            _record(clip, TARGET_ONLY, 1.0, alone),
            _record(clip, "serial γ=5", 0.5 * factor, together),
            _record(clip, "serial γ=10", 0.4 * factor, together),
            _record(clip, "vpsd γ=5", 0.3 * factor, together),
            _record(clip, "adaptive", 0.2, together),
        )
    ]


def test_a_row_compares_adaptive_with_the_best_lengths_and_the_ideal() -> None:
    tried = _records()
    assert best_systems(tried) == {
        "off": TARGET_ONLY,
        "serial": "serial γ=10",
        "vpsd": "vpsd γ=5",
        "adaptive": "adaptive",
    }
    records = [each for each in tried if each.system != "serial γ=5"]
    found = level(records, tried)
    assert found["agreement"] == 0.9
    assert (found["serial"]["gamma"], found["vpsd"]["gamma"]) == (10, 5)
    assert found["over_serial"]["mean"] == pytest.approx((2 + 4) / 2)
    assert found["over_vpsd"]["mean"] == pytest.approx((1.5 + 3) / 2)
    assert found["least_over_better"] == pytest.approx(1.5)
    assert found["of_ideal"] == pytest.approx(5.0 / found["ideal"])
    assert found["with_messages"] < found["ideal"]
    assert found["of_with_messages"] == pytest.approx(5.0 / found["with_messages"])
    assert (found["num_equal"], found["num_answers"]) == (6, 6)


def test_step_times_and_traces_are_those_of_the_answers() -> None:
    machine = measured_machine(_records())
    assert [machine.target.ms(rows, 100) for rows in (1, 3, 5, 6, 9)] == pytest.approx(
        [8.0, 8.2, 8.4, 8.5, 8.5]
    )
    assert machine.draft.ms(1, 0) == 1.0
    # Serial: two rounds of 10 ms of waiting, in which 7 tokens of 1 ms were drafted.
    assert machine.leg_ms == pytest.approx((20 - 7) / 8)
    assert machine.target_scheduling_ms == pytest.approx(0.5)
    verdicts = [_verdict(1, 50), _verdict(4, 6, is_rejection=True), _verdict(5, 5)]
    short, fitting, wrong = (
        _record("a", "vpsd γ=5", 0.3, verdicts, after=after) for after in ((), (5, 6), (88, 6))
    )
    trace = trace_of(short)
    assert trace.agrees == (True, True, True, True, False, True, True, True, True, True)
    assert trace.fits == {}
    assert trace_of(short, [fitting]).fits == {4: True}
    assert trace_of(wrong).fits == {4: False}


def test_no_forward_takes_less_time_than_one_of_fewer_rows() -> None:
    # Of 4 rows there was one forward, which was fast by chance.
    of_rows = [(3, 8.0), (3, 9.0), (3, 10.0), (4, 5.0), (6, 8.5), (9, 12.0)]
    verdicts = [_verdict(1, 50), *(_timed(rows, ms) for rows, ms in of_rows)]
    records = [_record("a", system, 0.2, verdicts) for system in ("adaptive", "serial γ=5")]
    machine = measured_machine(records)
    found = [machine.target.ms(rows, 100) for rows in (3, 4, 6, 9)]
    assert found == pytest.approx([8.0, 8.0, 8.5, 12.0])


@pytest.mark.parametrize("share", [0.85, 1.0])
def test_no_policy_is_faster_than_the_ideal(share: float) -> None:
    traces = [Trace(tuple(agreement_trace(random.Random(0), 60, share, 0.0)))]
    ideal = ideal_speedup(traces, MACHINE)
    off = replay_all(PolicyChoice("off"), traces, MACHINE).decode_ns
    for choice in (
        PolicyChoice("adaptive"),
        PolicyChoice("optimistic"),
        *(PolicyChoice(name, gamma) for name in ("serial", "vpsd") for gamma in (3, 7, 15)),
    ):
        assert off / replay_all(choice, traces, MACHINE).decode_ns <= ideal * 1.001, choice
    # Whole blocks of which every token is right take as long as the slower side.
    assert ideal <= 8.0 / min(1.0, (8.0 + 31 * 0.1) / 32) + 1e-6


def test_a_better_draft_is_predicted_to_be_faster() -> None:
    lines = simulated_lines(MACHINE, (0.6, 0.9), num_traces=1)
    assert set(lines) == {"serial", "vpsd", "adaptive"}
    assert all(weak < strong for weak, strong in lines.values())


def test_a_weaker_draft_differs_from_the_bundled_one_in_its_weights(tmp_path: Path) -> None:
    bundled = find_draft("bundled", tmp_path, "short")
    made = find_draft("85%", tmp_path, "short")
    assert find_draft(made, tmp_path, "short") == made
    files = {path.name for path in Path(bundled).iterdir()}
    assert files == {path.name for path in Path(made).iterdir()}
    differ = [n for n in files if (Path(bundled) / n).read_bytes() != (Path(made) / n).read_bytes()]
    assert differ == ["model.safetensors"]
