"""From results to the page: criteria, tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.pruning import tables
from bench.pruning.plots import DRAWERS, draw_all
from bench.pruning.publish import criteria, page, read_results

ENVIRONMENT = {
    "time": "2030-01-01T00:00:00+00:00",
    "commit": "0123456789ab",
    "cpu": "a CPU",
    "num_cores_machine": 2,
    "python": "3.11",
    "versions": {"torch": "2"},
}


def spread(mean: float, half: float = 0.004) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def result(experiment: str, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "command": f"python -m bench.pruning {experiment}",
        "environment": ENVIRONMENT,
        "num_clips": 200,
        "num_layers_tapped": 5,
        "rows": list(rows),
        **more,
    }


def ratio_row(label: str, agreement: float, *, minus_holistic: float = 0.0) -> dict[str, Any]:
    strategy, _, ratio = label.partition(" ")
    reading = {"mean_tokens_per_forward": 5.0, "mean_run_length": 30.0, "decode_speedup": 4.0}
    return {
        "label": label,
        "strategy": strategy,
        "ratio": float(ratio or 0),
        "kept_tokens": 115.0,
        "agreement": spread(agreement),
        "content_agreement": spread(agreement - 0.02),
        "minus none": spread(agreement - 0.98),
        "minus holistic 0.9": spread(minus_holistic, 0.002),
        "readings": {"adaptive": reading},
    }


def ratio_result(holistic: float, attention: float) -> dict[str, Any]:
    rows = [
        ratio_row("none", 0.98, minus_holistic=0.98 - holistic),
        ratio_row("holistic 0.9", holistic),
        ratio_row("holistic 0.95", holistic - 0.01),
        ratio_row("attention 0.9", attention, minus_holistic=attention - holistic),
        ratio_row("attention 0.95", attention - 0.01),
    ]
    return result("ratio", rows, machine={"target_ms": 5.0, "draft_ms": 0.4})


def first_token_row(system: str, **more: Any) -> dict[str, Any]:
    return {
        "system": system,
        "num_requests": 60,
        "ttft_ms": 500.0,
        "ttft_ratio": spread(1.02),
        "target_prefill_ms": 450.0,
        "selection_ms": 2.8,
        "draft_prefill_ms": None,
        **more,
    }


def online_row(system: str, group: str, **more: Any) -> dict[str, Any]:
    return {
        "system": system,
        "group": group,
        "num_clips": 10,
        "num_answers": 10,
        "num_equal": 10,
        "decode_speedup": spread(5.0),
        "end_to_end_speedup": spread(2.0),
        "acceptance_rate": 0.95,
        "mean_tokens_per_forward": 8.0,
        "mean_run_length": None,
        "ttft_ms": 400.0,
        "ttft_ratio": spread(1.01),
        "first_block_ready": spread(0.99),
        "first_block_late_ms": spread(-90.0),
        "serial_draft_share": None,
        **more,
    }


def every_result() -> dict[str, dict[str, Any]]:
    costs = {
        "ratio": 0.9, "kept_tokens": spread(115), "draft_cache_kib": spread(128),
        "draft_prefill_ms": spread(3), "draft_step_ms": spread(0.3), "draft_tower_ms": spread(60),
        "target_tower_ms": spread(60), "target_prefill_ms": spread(380),
        "target_step_ms": spread(5), "draft_share γ=3": spread(0.2),
    }  # fmt: skip
    boundary = {"kept": spread(0.24), "present": 0.306, "ratio": 0.78}
    ablation = [
        {
            "label": label,
            "agreement": spread(0.97),
            "content_agreement": spread(0.95),
            "minus none": spread(-0.01),
            "minus the base": spread(0.0),
        }
        for label in ("scores: attention", "layers: 5", "none")
    ]
    kinds = [{"group": "kind: count", "num_tokens": 1200, "agreement": {"none": spread(0.9)}}]
    strategies = [
        online_row(system, "strategies")
        for system in ("target-only", "none", "holistic 0.5", "holistic 0.9")
    ]
    policies = [
        online_row("target-only", "policies"),
        online_row("serial γ=5, none", "policies", serial_draft_share=0.3),
    ]
    overlap = [online_row("adaptive", f"{count} of 20 layers tapped") for count in (5, 20)]
    frames = [
        online_row(system, f"{count} frames", num_frames=count)
        for count in (8, 16)
        for system in ("target-only", "adaptive, none", "adaptive, holistic 0.9")
    ]
    first_token = [
        first_token_row("target-only", ttft_ratio=spread(1.0)),
        first_token_row(
            "adaptive, holistic 0.9", first_block_ready=0.9876, first_block_late_ms=-190.0
        ),
    ]
    confirm = [ratio_row("none", 0.98), ratio_row("holistic 0.9", 0.975)]
    return {
        "ratio": ratio_result(0.975, 0.97),
        "costs": result("costs", [costs]),
        "bias": result("bias", [{"label": "attention", "ring": boundary, "ends": boundary}]),
        "ablation": result("ablation", ablation, ratio=0.9),
        "confirm": result("confirm", confirm),
        "kinds": result("kinds", kinds),
        "first-token": result("first-token", first_token),
        "strategies": result("strategies", strategies),
        "policies": result("policies", policies),
        "overlap": result("overlap", overlap),
        "frames": result("frames", frames),
    }


def test_the_criteria_are_judged_from_the_figures() -> None:
    met = criteria({"ratio": ratio_result(0.975, 0.97)})
    assert len(met) == 2 and all(line.endswith("**met**.") for line in met)
    assert "`attention`" in met[0] and "+0.50" in met[0]
    worse, costly = criteria({"ratio": ratio_result(0.95, 0.97)})
    assert worse.endswith("**not met**.") and costly.endswith("**not met**.")
    online = criteria(every_result())
    assert "98.8% of 60 requests" in online[2] and online[2].endswith("**met**.")
    assert "1.0200 ±0.0040" in online[3] and online[3].endswith("**met**.")
    slow = every_result()
    slow["first-token"]["rows"][1] |= {"ttft_ratio": spread(1.04), "first_block_ready": 0.94}
    assert all(line.endswith("**not met**.") for line in criteria(slow)[2:])


def test_a_strategy_that_cannot_be_told_apart_does_not_spoil_the_first_criterion() -> None:
    lines = criteria({"ratio": ratio_result(0.9700, 0.9701)})
    assert lines[0].endswith("**met**.")


def test_every_section_has_its_command_picture_and_table(tmp_path: Path) -> None:
    results = every_result()
    text = page(results)
    for name, found in results.items():
        assert f"`{found['command']}`" in text
        assert (f"](pruning-{name}.svg)" in text) == (name in DRAWERS)
    assert "| holistic 0.9 | 115 | 97.50 ±0.40 |" in text
    assert "**16 frames**" in text and "commit `0123456789ab`" in text
    drawn = draw_all(results, tmp_path)
    assert {path.name for path in drawn} == {f"pruning-{name}.svg" for name in DRAWERS}
    assert all(path.read_text(encoding="utf-8").startswith("<?xml") for path in drawn)


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    pictures = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (drawn,) = draw_all({"bias": every_result()["bias"]}, tmp_path / folder)
        pictures.append(drawn.read_bytes())
    assert pictures[0] == pictures[1]


def test_only_what_was_run_is_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "bias.json").write_text(json.dumps(every_result()["bias"]), encoding="utf-8")
    results = read_results(tmp_path)
    assert list(results) == ["bias"]
    assert "Position bias" in page(results) and "What was asked for" not in page(results)


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (spread(0.975), "97.50 ±0.40")])
def test_shares_are_shown_in_percent(value: dict[str, float] | None, text: str) -> None:
    assert tables.percent(value) == text
