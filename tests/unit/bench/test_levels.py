"""What a row of the table of agreement levels says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.drafts.levels import best_systems, level
from bench.drafts.weaker import find_draft
from hippo.client.answers import Answer
from hippo.client.latency import TARGET_ONLY, Record


def _record(clip: str, system: str, decode_s: float) -> Record:
    """An answer of ten tokens, of which one was rejected."""
    figures = {
        "num_rejections": 1,
        "mean_run_length": 5.0,
        "mean_tokens_per_forward": 3.0,
        "timings_ms": {"decode": 1e3 * decode_s},
    }
    answer = Answer(
        text="text",
        asked_s=0.0,
        piece_s=(0.1, 0.1 + decode_s),
        token_ids=tuple(range(10)),
        figures=figures,
    )
    return Record(clip, system, 0.0, answer, 1.0, 1.1, tuple(range(10)))


def test_a_row_compares_adaptive_with_the_best_lengths() -> None:
    tried = [
        record
        for clip, factor in (("a", 1.0), ("b", 2.0))
        for record in (
            _record(clip, TARGET_ONLY, 1.0),
            _record(clip, "serial γ=5", 0.5 * factor),
            _record(clip, "serial γ=10", 0.4 * factor),
            _record(clip, "vpsd γ=5", 0.3 * factor),
            _record(clip, "adaptive", 0.2),
        )
    ]
    assert best_systems(tried) == {
        "off": TARGET_ONLY,
        "serial": "serial γ=10",
        "vpsd": "vpsd γ=5",
        "adaptive": "adaptive",
    }
    found = level([each for each in tried if each.system != "serial γ=5"])
    assert found["agreement"] == pytest.approx(0.9)
    assert (found["serial"]["gamma"], found["vpsd"]["gamma"]) == (10, 5)
    assert found["over_serial"]["mean"] == pytest.approx((2 + 4) / 2)
    assert found["over_vpsd"]["mean"] == pytest.approx((1.5 + 3) / 2)
    assert found["least_over_better"] == pytest.approx(1.5)
    assert (found["num_equal"], found["num_answers"]) == (6, 6)


def test_a_weaker_draft_differs_from_the_bundled_one_in_its_weights(tmp_path: Path) -> None:
    bundled = find_draft("bundled", tmp_path, "short")
    made = find_draft("85%", tmp_path, "short")
    assert find_draft(made, tmp_path, "short") == made
    files = {path.name for path in Path(bundled).iterdir()}
    assert files == {path.name for path in Path(made).iterdir()}
    differ = [n for n in files if (Path(bundled) / n).read_bytes() != (Path(made) / n).read_bytes()]
    assert differ == ["model.safetensors"]
