"""The arithmetic of what an answer takes at least."""

from __future__ import annotations

import pytest

from bench.load_bound import LoadBoundSettings, measure


def test_an_answer_is_its_clip_its_prompt_and_its_share_of_the_forwards() -> None:
    settings = LoadBoundSettings(num_sequences=2, rows_each=4, answer_rows=20, repeats=1)
    tower, prompt, forward, _, answer = measure(settings)
    assert forward[:2] == ("forward of 2", 8)
    assert answer[1] == int(prompt[1]) + 20
    for column in (2, 3):
        parts = float(tower[column]) + float(prompt[column]) + 2.5 * float(forward[column])
        assert float(answer[column]) == pytest.approx(parts)
