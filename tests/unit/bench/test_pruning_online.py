"""What is measured through the services, and the rows that come of it."""

from __future__ import annotations

import av
import pytest

from bench.client import Answer
from bench.measure import Record
from bench.pruning.online import (
    frame_systems,
    policy_systems,
    rows_of,
    strategy_systems,
    tapped_layers,
    write_long_clips,
)
from bench.systems import TARGET_ONLY
from gateway.schemas import SpeculationOptions
from hippo.types import PruningStrategy


def record(clip: str, system: str, ttft_s: float, late_ms: float | None, policy: str) -> Record:
    timings = {
        "first_block_after_first_token": late_ms,
        "target_wait": 250.0,
        "decode": 1000.0,
    }
    return Record(
        clip=clip,
        system=system,
        temperature=0.0,
        answer=Answer(
            text="",
            asked_s=0.0,
            piece_s=(ttft_s, ttft_s + 1.0),
            token_ids=(1, 2),
            figures={"policy": policy, "timings_ms": timings},
        ),
        baseline_decode_s=1.0,
        baseline_end_to_end_s=1.0,
        baseline_ids=(1, 2),
    )


def test_every_system_is_a_request_that_the_gateway_takes() -> None:
    for systems in (strategy_systems(), policy_systems(), frame_systems()):
        assert len({system.name for system in systems}) == len(systems)
        for system in systems:
            SpeculationOptions.model_validate(system.speculative)
    measured = {system.speculative["pruning"]["strategy"] for system in strategy_systems()}
    assert measured == {strategy.value for strategy in PruningStrategy}


def test_first_tokens_are_compared_clip_by_clip_with_target_only() -> None:
    records = [
        record("a", TARGET_ONLY, 0.4, None, "off"),
        record("a", TARGET_ONLY, 0.6, None, "off"),
        record("b", TARGET_ONLY, 1.0, None, "off"),
        record("a", "pruned", 0.5, -30.0, "adaptive"),
        record("b", "pruned", 1.2, 10.0, "adaptive"),
        record("a", "lost", 0.5, -30.0, "adaptive"),
        record("b", "lost", 1.0, None, "adaptive"),
        record("a", "serial", 0.5, -30.0, "serial"),
    ]
    summary = [{"system": name} for name in (TARGET_ONLY, "pruned", "lost", "serial")]
    alone, pruned, lost, serial = rows_of(records, summary, "group")
    assert alone["ttft_ratio"]["mean"] == pytest.approx(1.0)
    assert "first_block_ready" not in alone and alone["serial_draft_share"] is None
    assert pruned["ttft_ratio"]["mean"] == pytest.approx(1.1)
    assert pruned["first_block_ready"]["mean"] == 0.5
    assert pruned["first_block_late_ms"]["mean"] == -10.0
    assert lost["first_block_ready"]["mean"] == 0.5  # what never came was not ready
    assert serial["serial_draft_share"] == 0.25


def test_the_first_layer_the_quarters_and_all_are_tapped() -> None:
    assert tapped_layers(20) == [1, 5, 10, 15, 20]
    assert tapped_layers(2) == [1, 2]


def test_clips_of_any_number_of_frames_are_written_in_both_orders(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    clips = write_long_clips(tmp_path_factory.mktemp("clips"), 2, num_frames=4)
    assert [clip.is_video_first for clip in clips] == [True, False]
    for clip in clips:
        with av.open(str(clip.path)) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height) == (336, 336)
            assert float(container.duration or 0) / 1e6 == pytest.approx(2.0, abs=0.3)
