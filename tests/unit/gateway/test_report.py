"""The figures that an answer carries about its own making."""

from __future__ import annotations

import pytest

from gateway.baseline import Baseline
from gateway.report import Record, figures
from hippo.types import (
    FramePlan,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    Verdict,
)

MS = 1_000_000
REQUEST = OpenRequest(
    request_id="test",
    messages=(),
    media=(),
    sampling=SamplingParams(),
    frame_plan=FramePlan(),
    pruning=Pruning(PruningStrategy.HOLISTIC, 0.9),
    max_tokens=8,
    end_token_ids=(),
)


@pytest.mark.parametrize(("block_ms", "reported"), [(30, -20.0), (65, 15.0), (None, None)])
def test_the_drafts_first_block_is_timed_against_the_end_of_the_targets_prefill(
    block_ms: int | None, reported: float | None
) -> None:
    record = Record(policy="vpsd", received_ns=0)
    if block_ms is not None:
        record.add_block(block_ms * MS)
        record.add_block(80 * MS)
    record.add_verdict(Verdict(0, 0, (5,)), 50 * MS)
    record.add_verdict(Verdict(0, 1, (6,)), 90 * MS)
    timings = figures(record, REQUEST, Baseline())["timings_ms"]
    assert timings["first_block_after_first_token"] == reported
    assert timings["time_to_first_token"] == 50.0


def test_what_the_draft_saw_and_how_long_the_choice_took_are_reported() -> None:
    record = Record(policy="vpsd", received_ns=0)
    record.selection = Selection((0, 4, 7), 27, score_ns=3 * MS)
    answer = figures(record, REQUEST, Baseline())
    assert answer["pruning"] == {
        "strategy": "holistic",
        "ratio": 0.9,
        "num_visual_tokens": 27,
        "num_kept_tokens": 3,
    }
    assert answer["timings_ms"]["selection"] == 3.0
