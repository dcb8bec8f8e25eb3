"""What corrections prepared ahead could gain, on answers that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.corrections import count_seconds, main
from hippo.simulation.traces import Trace, Words

_IDS = tuple(range(50, 80))


def _trace(second_id: int, margin: float) -> Trace:
    """A draft that is wrong at place 9, where it is ``margin`` ahead of ``second_id``."""
    draft_ids = (*_IDS[:9], 1, *_IDS[10:])
    words = Words(
        token_ids=_IDS,
        draft_ids=draft_ids,
        branches={9: (60, 61, 62)},
        text_ids=(),
        second_ids=(*[2] * 9, second_id, *[2] * 20),
        margins=(*[5.0] * 9, margin, *[5.0] * 20),
        branch_margins={9: (4.0, 0.5, 3.0)},
    )
    return Trace(tuple(a == b for a, b in zip(_IDS, draft_ids, strict=True)), words=words)


def test_a_wrong_token_counts_by_its_second_choice_and_its_place_among_the_uncertain() -> None:
    found = count_seconds([_trace(59, 0.1), _trace(59, 1.0), _trace(3, 4.5)])
    assert (found["num_tokens"], found["num_wrong"], found["num_second_right"]) == (90, 3, 2)
    # Less certain than the second: one place behind it; than the third: three.
    assert found["least_certain"]["8"] == [1, 2, 3]


def test_traces_without_words_or_margins_are_left_out() -> None:
    silent = dataclasses.replace(_trace(59, 0.1), words=None)
    assert count_seconds([silent])["num_wrong"] == 0


def test_the_command_replays_recorded_answers_and_drawn_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(59, 0.1)
    assert trace.words is not None
    line = {**dataclasses.asdict(trace.words), "agrees": "1" * 9 + "0" + "1" * 20}
    (tmp_path / "traces.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    main(
        [
            *("--traces", str(tmp_path / "traces.jsonl"), "--policies", "serial:3", "--most", "1"),
            *("--pairs", "qwen-7b-72b", "--run-lengths", "4", "--num-traces", "1"),
            *("--second-choice", "1", "--out", str(tmp_path / "out.json")),
        ]
    )
    assert "the second choice is right at 100%" in capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [line["policy"] for line in document["gains"]] == ["serial γ=3"] * 2
    assert all(line["gain_1_ready"] > 0 and line["gain_1"] > 0 for line in document["gains"])
