"""The fit, on answers whose costs are known because they were simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.calibration import Calibration
from bench.core_work import CoreWork
from bench.fitting import fit
from bench.simulate_fit import predict
from bench.sums import recorded, replayed
from bench.systems import policy_of
from hippo.simulation.machine import Machine, StepTime
from hippo.simulation.replay import PolicyChoice, replay
from hippo.simulation.traces import Trace, drawn_traces

TRUTH = Machine(
    name="known",
    target=StepTime(one_row_ms=5.0, several_ms=0.4, row_ms=0.25),
    draft=StepTime(one_row_ms=0.5, several_ms=0.1),
    target_prefill_ms=30.0,
    draft_prefill_ms=8.0,
    leg_ms=0.3,
    draft_message_ms=0.2,
    draft_verdict_ms=0.6,
    target_message_ms=0.05,
    target_scheduling_ms=0.3,
    jitter=0.05,
)


def record_of(
    system: str, trace: Trace, clip: str, seed: int, machine: Machine = TRUTH
) -> dict[str, Any]:
    """What the bench would write of a simulated answer."""
    outcome = replay(policy_of(system), trace, machine, seed=seed)
    stats = outcome.stats
    return {
        "clip": clip,
        "system": system,
        "num_tokens": len(outcome.output_ids),
        "figures": {
            "num_forwards": stats.num_forwards,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_drafted_tokens": stats.num_drafted_tokens,
            "timings_ms": {
                "decode": outcome.decode_ns / 1e6,
                "target_forward": stats.forward_ns / 1e6,
                "target_wait": stats.target_wait_ns / 1e6,
                "draft_wait": stats.draft_wait_ns / 1e6,
                "draft_step": stats.draft_step_ns / 1e6 or None,
                "target_prefill": 30.0,
                "draft_prefill": 8.0,
                "first_block_after_first_token": -20.0,
            },
        },
    }


def records(system: str, traces: Sequence[Trace], machine: Machine = TRUTH) -> list[dict[str, Any]]:
    return [
        record_of(system, trace, trace.name, 100 + k, machine) for k, trace in enumerate(traces)
    ]


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return drawn_traces(agreement=0.95, num_traces=8, num_tokens=80)


def test_a_fit_recovers_known_costs_and_predicts_other_policies(traces: list[Trace]) -> None:
    own, alone = records("serial γ=5", traces), records("target-only", traces)
    found = fit(own, alone, traces, name="fitted", most_replays=250).machine
    assert found.target.ms(1, 0) == pytest.approx(TRUTH.target.ms(1, 0), rel=0.05)
    assert found.target.ms(6, 0) == pytest.approx(TRUTH.target.ms(6, 0), rel=0.05)
    for system in ("target-only", "serial γ=5", "serial γ=3", "vpsd γ=5"):
        measured = recorded(records(system, traces)).decode
        predicted = replayed(policy_of(system), traces, found).decode
        assert predicted == pytest.approx(measured, rel=0.06), system


def test_a_calibration_tells_what_one_policy_does_not_show(traces: list[Trace]) -> None:
    rows = (1.0, 2.0, 4.0, 8.0, 33.0)
    truth = replace(TRUTH, draft=replace(TRUTH.draft, cold_points=((1.0, 0.8),)))
    own, alone = records("serial γ=5", traces, truth), records("target-only", traces, truth)
    # The machine was half as fast when it was calibrated: the shape counts, not the size.
    calibration = Calibration(
        step_ms={
            "target": tuple((n, 2 * TRUTH.target.ms(int(n), 0)) for n in rows),
            "draft": tuple((n, 2 * TRUTH.draft.ms(int(n), 0)) for n in rows),
        },
        contention={"target": 0.1, "draft": 0.2},
        cold_ms={"target": ((1.0, 0.0), (8.0, 0.0)), "draft": ((5.0, 2 * 0.8),)},
        block_ms=0.4,
        draft_disturbance=0.5,
    )
    work = CoreWork(message_ms=0.22, verdict_ms=0.55, token_ms=0.0)
    found = fit(
        own, alone, traces, name="", most_replays=250, calibration=calibration, work=work
    ).machine
    # Serial γ=5 shows forwards of six rows.
    assert found.target.ms(33, 0) == pytest.approx(TRUTH.target.ms(33, 0), rel=0.08)
    assert found.target_contention == pytest.approx(0.1, rel=0.5)
    assert found.draft_contention == pytest.approx(0.2, rel=0.5)
    assert found.draft.cold_ms(1) == pytest.approx(0.8, rel=0.5)
    assert found.target.cold_ms(8) == 0.0
    assert found.draft_message_ms == pytest.approx(0.2, rel=0.2)
    assert found.draft_verdict_ms == pytest.approx(0.6, rel=0.2)
    assert (found.draft_token_ms, found.draft_disturbance) == (0.0, 0.5)
    # 0.2 ms at the speed of the records, of which a message to a target that rests takes a part.
    block_ms = found.target_message_ms + found.target_interruption_ms
    assert block_ms == pytest.approx(0.2, rel=0.1)


def test_a_run_is_learnt_from_on_even_clips_and_predicted_on_the_odd_ones(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = ("target-only", "serial γ=5", "adaptive")
    run: dict[str, Any] = {
        "kind": "short",
        "dtype": "float32",
        "records": [record for system in systems for record in records(system, traces)],
    }
    monkeypatch.setattr("bench.fitting.MOST_REPLAYS", 30)
    by_clip = {trace.name: trace for trace in traces}
    result = predict([run["records"]], by_clip, "serial γ=5", run)
    assert (result["num_learnt"], result["num_held_out"]) == (4, 4)
    by_system = {each["system"]: each for each in result["predictions"]}
    assert list(by_system) == list(systems)
    assert by_system["adaptive"]["is_learnt"] is False
    for each in result["predictions"]:
        assert each["ideal"] < each["measured"]
        assert 0 < each["efficiency"] < 1


def test_a_policy_is_learnt_from_at_all_of_its_block_lengths(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = ("target-only", "serial γ=3", "serial γ=7", "vpsd γ=3")
    own = [record for system in systems for record in records(system, traces)]
    monkeypatch.setattr("bench.fitting.MOST_REPLAYS", 250)
    by_clip = {trace.name: trace for trace in traces}
    result = predict([own], by_clip, "serial", {"kind": "short", "dtype": "float32"})
    learnt = [each["system"] for each in result["predictions"] if each["is_learnt"]]
    assert learnt == ["target-only", "serial γ=3", "serial γ=7"]
    for each in result["predictions"]:
        assert each["predicted"] == pytest.approx(each["measured"], rel=0.08), each["system"]


def test_of_a_measurement_repeated_the_mean_run_is_learnt(traces: list[Trace]) -> None:
    slow = replace(TRUTH, target=TRUTH.target.scaled(1.5))
    runs = [
        (records("serial γ=5", traces, machine), records("target-only", traces, machine))
        for machine in (TRUTH, slow)
    ]
    own, alone = ([record for run in runs for record in run[k]] for k in (0, 1))
    found = fit(own, alone, traces, name="fitted", most_replays=250).machine
    mean = recorded(own).scaled(0.5)
    predicted = replayed(PolicyChoice("serial", 5), traces, found)
    assert predicted.num_tokens == mean.num_tokens
    assert predicted.decode == pytest.approx(mean.decode, rel=0.02)


def test_records_and_traces_of_other_answers_are_refused(traces: list[Trace]) -> None:
    own, alone = records("serial γ=5", traces), records("target-only", traces)
    with pytest.raises(ValueError, match="the traces"):
        fit(own, alone, traces[1:], name="")
    with pytest.raises(ValueError, match="without one"):
        fit(alone, alone, traces, name="")
    with pytest.raises(ValueError, match="no records of 'vpsd γ=9'"):
        predict([own], {}, "vpsd γ=9", {"kind": "short", "dtype": "x"})
