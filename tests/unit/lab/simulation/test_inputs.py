"""Traces: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hippo.errors import InvalidRequestError
from hippo.lab.simulation.traces import (
    agreement_of_run_length,
    drawn_traces,
    mean_agreement,
    read_traces,
)


def test_traces_are_read_plain_and_as_json_and_short_ones_left_out(tmp_path: Path) -> None:
    lines = ["1101", "1", "", json.dumps({"agrees": "10", "clip": "a", "num_prompt_tokens": 7})]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(lines))
    plain, rich = read_traces(path, num_prompt_tokens=5)
    assert plain.agrees == (True, True, False, True)
    assert plain.num_prompt_tokens == plain.num_draft_prompt_tokens == 5
    assert (rich.name, rich.num_prompt_tokens, rich.num_draft_prompt_tokens) == ("a", 7, 7)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("11x", "line 1"),
        ('{"agrees": 5}', "line 1"),
        ("{", "no JSON"),
        ('{"agrees": "11", "num_prompt_tokens": null}', "line 1: numbers of prompt tokens"),
        ("1\n", "two tokens"),
        ("\xff\n", "no text in UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_traces_is_refused_with_its_line(
    tmp_path: Path, text: str | None, part: str
) -> None:
    path = tmp_path / "traces"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequestError, match=part):
        read_traces(path)


def test_drawn_traces_have_the_rate_asked_for_bursty_or_not() -> None:
    for burstiness in (0.0, 0.5, 1.0):
        traces = drawn_traces(
            agreement=0.85, num_traces=20, num_tokens=1000, burstiness=burstiness, seed=1
        )
        assert mean_agreement(traces) == pytest.approx(0.85, abs=0.02)
    assert traces == drawn_traces(
        agreement=0.85, num_traces=20, num_tokens=1000, burstiness=1.0, seed=1
    )


def test_a_run_length_is_one_more_than_the_mean_accepted_tokens_of_its_rate() -> None:
    for accepted in (3.0, 8.05):  # PEARL's and HIPPO's M
        assert agreement_of_run_length(accepted + 1) == pytest.approx(accepted / (accepted + 1))
