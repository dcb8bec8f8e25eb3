"""The figures of bench.reuse."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from bench.reuse import Record, summarise, table

ONE = Record(
    clip="a.mp4",
    kind="long",
    policy="off",
    case="question",
    is_video_first=True,
    num_prompt_tokens=1000,
    num_cached_tokens=900,
    cold_ttft_s=0.6,
    warm_ttft_s=0.1,
    cold_prefill_s=0.5,
    warm_prefill_s=0.02,
    cold_draft_prefill_s=None,
    warm_draft_prefill_s=None,
    preprocess_s=0.07,
    is_equal=True,
)


def test_each_group_has_its_medians_and_its_equal_pairs() -> None:
    records = [
        ONE,
        replace(ONE, cold_ttft_s=0.7, is_equal=False),
        replace(ONE, cold_ttft_s=0.9),
        replace(ONE, policy="adaptive", cold_draft_prefill_s=0.1, warm_draft_prefill_s=0.005),
    ]
    off, adaptive = summarise(records)
    assert (off["num_pairs"], off["num_equal"]) == (3, 2)
    assert (off["cold_ttft_ms"], off["warm_ttft_ms"]) == (700, 100)
    assert off["cold_draft_prefill_ms"] is None
    assert adaptive["warm_draft_prefill_ms"] == 5


def test_the_table_shows_what_is_spared() -> None:
    shown = io.StringIO()
    Console(width=170, file=shown).print(table(summarise([ONE])))
    text = shown.getvalue()
    assert "long, off, question" in text
    assert "1 of 1" in text and "83%" in text
