"""The figures of a pair before and after."""

from __future__ import annotations

from hippo.lab.distill.results import markdown_of

MEASURED = {
    "agreement": 0.75,
    "tokens_per_forward": 3.0,
    "run_length": 4.5,
    "decode_speedup": {"mean": 2.0, "low": 1.5, "high": 2.5},
    "end_to_end_speedup": {"mean": 1.5, "low": 1.2, "high": 1.8},
    "num_equal": 12,
    "num_answers": 12,
}


def test_the_page_has_the_figures_before_and_after() -> None:
    page = markdown_of("a pair", MEASURED, {**MEASURED, "agreement": 1.0})
    assert "| agreement | 75.00% | 100.00% |" in page and "| 12/12 | 12/12 |" in page
    assert "| 2.00 [1.50, 2.50] |" in page
