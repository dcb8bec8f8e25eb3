"""What the page says of clients that leave."""

from __future__ import annotations

import pytest

from bench import leaving
from bench.environment import describe_environment


def test_the_page_has_a_line_a_kind_of_moment_in_milliseconds() -> None:
    result = {
        "command": "python -m bench.leaving",
        "environment": describe_environment(),
        "look_s": [0.004, 0.006, 0.005],
        "held_s": {"before the first token": [0.01, 0.02, 0.0125], "in mid-answer": [0.007]},
    }
    section = leaving.section(result)
    assert "| before the first token | 3 | 12.5 | 20.0 |" in section
    assert "| in mid-answer | 1 | 7.0 | 7.0 |" in section
    assert "takes 5.0 ms" in section


def test_the_page_of_this_repository_has_the_markers() -> None:
    text = leaving.PAGE.read_text(encoding="utf-8")
    assert "<!-- leaving: begin -->" in text and "<!-- leaving: end -->" in text


def test_a_single_client_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        leaving.main(["--num-clients", "1"])
    assert "at least 2" in capsys.readouterr().err
