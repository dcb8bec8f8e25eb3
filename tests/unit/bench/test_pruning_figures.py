"""The pure parts of the pruning benchmark: intervals, boundary shares, accepted lengths."""

from __future__ import annotations

import pytest

from bench.pruning.services import answer_times
from bench.pruning.statistics import Counts, difference, interval
from bench.pruning.tables import accepted_tokens, markdown_tables
from hippo.client.answers import Answer
from hippo.client.figures import summarise
from hippo.client.latency import Record


def counted(clips: dict[str, tuple[int, int]]) -> Counts:
    counts = Counts()
    for clip, (hits, total) in clips.items():
        counts.add_hits(clip, hits, total)
    return counts


def _width(counts: Counts) -> float:
    found = interval(counts)
    return found["high"] - found["low"]


def test_an_interval_is_of_all_tokens_and_resamples_clips() -> None:
    counts = counted({"a": (9, 10), "b": (45, 90)})
    found = interval(counts)
    # The ends: all draws "b", all draws "a".
    assert found == pytest.approx({"mean": 0.54, "low": 0.5, "high": 0.9})


def test_a_paired_difference_does_not_see_what_both_sides_share() -> None:
    first = counted({str(clip): (50 + clip, 100) for clip in range(40)})
    second = counted({str(clip): (48 + clip, 100) for clip in range(40)})
    found = difference(first, second)
    assert found == pytest.approx(dict.fromkeys(("mean", "low", "high"), 0.02))
    assert _width(first) > 0.04


def test_differences_of_other_clips_and_shares_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="same clips"):
        difference(counted({"a": (1, 1)}), counted({"b": (1, 1)}))
    with pytest.raises(ValueError, match="no clips"):
        interval(Counts())


def test_accepted_tokens_are_those_between_rejections() -> None:
    """Of 100 tokens ten are wrong: nine right ones before each."""
    agreement = interval(counted({"a": (90, 100)}))
    assert accepted_tokens(agreement) == "9.0"
    assert accepted_tokens({"mean": 1.0}) == "∞"


def record(system: str, *, rejections: int, prefill_ms: float | None) -> Record:
    """An answer of two tokens that took half a second, and target-only twice as long."""
    figures = {
        "num_rejections": rejections,
        "timings_ms": {"decode": 250.0, "draft_prefill": prefill_ms},
        "mean_tokens_per_forward": 3.0,
        "acceptance_rate": 0.75,
    }
    answer = Answer(text="a", asked_s=1.0, piece_s=(1.25, 1.5), token_ids=(1, 2), figures=figures)
    return Record("clip", system, 0.0, answer, 0.5, 1.0, (1, 2))


def test_accepted_tokens_and_times_of_services_are_of_all_answers() -> None:
    records = [
        record("holistic 0.9", rejections=0, prefill_ms=20.0),
        record("holistic 0.9", rejections=1, prefill_ms=40.0),
    ]
    found = answer_times(records)
    assert found == {"end_to_end_ms": 500.0, "draft_prefill_ms": 30.0, "accepted_tokens": 3.0}
    alone = answer_times([record("target-only", rejections=0, prefill_ms=None)])
    assert alone["draft_prefill_ms"] is None and alone["accepted_tokens"] is None


def test_the_services_table_has_speed_times_and_accepted_tokens() -> None:
    by_system = {
        "target-only": record("target-only", rejections=0, prefill_ms=None),
        "uv 0.9": record("uv 0.9", rejections=1, prefill_ms=20.0),
    }
    rows = [
        row | answer_times([by_system[row["system"]]])
        for row in summarise(list(by_system.values()))
    ]
    title, table = markdown_tables("services", {"rows": rows})
    assert title.startswith("1 of 1 answers equal target-only's, which takes 500 ms end to end")
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert cells == ["uv 0.9", *["2.00 [2.00, 2.00]"] * 2, "500", "20", "1.0", "3.0", "0.75"]
