"""The figures of a pair before and after."""

from __future__ import annotations

import pytest

from hippo.lab.distill.results import markdown_of, predicted, traces_of
from tests.unit.lab.distill.test_training import answer

MEASURED = {
    "tokens_per_forward": 3.0,
    "run_length": 4.5,
    "decode_speedup": {"mean": 2.0, "low": 1.5, "high": 2.5},
    "end_to_end_speedup": {"mean": 1.5, "low": 1.2, "high": 1.8},
    "num_equal": 12,
    "num_answers": 12,
    "target_step_ms": 20.0,
    "target_row_ms": 0.4,
    "draft_step_ms": 2.0,
    "transport_ms_per_round": 0.5,
}


def test_a_draft_that_agrees_more_is_predicted_to_be_faster() -> None:
    answers = {f"clip {number}": answer(number) for number in range(3)}
    marks = {"clip 0": "1101" * 10, "clip 1": "1" * 40, "clip 2": "1"}
    traces = traces_of(marks, answers)
    assert [trace.name for trace in traces] == ["clip 0", "clip 1"]  # a prefill settles the third
    assert (traces[0].num_prompt_tokens, traces[0].num_draft_prompt_tokens) == (40, 22)
    weak, strong = predicted(traces[:1], MEASURED), predicted(traces[1:], MEASURED)
    assert (weak["agreement"], strong["agreement"]) == (0.75, 1.0)
    assert 1 < weak["predicted_speedup"] < strong["predicted_speedup"]
    page = markdown_of("a pair", {**MEASURED, **weak}, {**MEASURED, **strong})
    assert "| agreement | 75.00% | 100.00% |" in page and "| 12/12 | 12/12 |" in page
    assert "| 2.00 [1.50, 2.50] |" in page


def test_a_draft_that_has_not_drafted_has_no_prediction() -> None:
    traces = traces_of({"clip 1": "01"}, {"clip 1": answer(1)})
    figures = predicted(traces, {**MEASURED, "draft_step_ms": None})
    assert figures == {"agreement": 0.5, "predicted_speedup": None}
    assert "| - | - |" in markdown_of("a pair", *[{**MEASURED, **figures}] * 2)
    with pytest.raises(KeyError):
        traces_of({"unknown": "11"}, {})
