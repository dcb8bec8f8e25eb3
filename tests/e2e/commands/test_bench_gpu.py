"""``python -m bench.gpu`` in its small form: steps and answers without a GPU, and cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.answers.runs import STACK_LOG
from bench.gpu import __main__ as gpu

_SMALL = ["--small", "--device", "cpu"]


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """Restores the number of torch's threads, which the command sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _sections(out: Path) -> dict[str, Any]:
    sections: dict[str, Any] = json.loads((out / "gpu.json").read_text())["sections"]
    return sections


def test_a_part_that_is_cut_off_says_so_and_what_was_measured_stays(tmp_path: Path) -> None:
    options = [*_SMALL, "--part", "steps", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    assert gpu.main(options) == 0
    measured = _sections(tmp_path / "out")["steps"]
    (steps,) = measured["tables"]
    assert {row["model"] for row in steps["figures"]} == {"Qwen2.5-VL-7B", "Qwen2.5-VL-3B"}
    assert all(row["floor_ms"] > 0 for row in steps["figures"] if row["rows"])
    report = tmp_path / "out" / "gpu.json"
    told = json.loads(report.read_text())
    told["sections"] = {"serve": measured}  # as if another part had been measured
    report.write_text(json.dumps(told))
    assert gpu.main([*options, "--seconds", "0"]) == 1
    cut = _sections(tmp_path / "out")
    assert "out of time before" in cut["steps"]["notes"][-1]
    assert cut["serve"] == measured


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_small_form_measures_every_part(tmp_path: Path) -> None:
    parts = ("steps", "serve")
    chosen = [flag for part in parts for flag in ("--part", part)]
    out = tmp_path / "out"
    assert gpu.main([*_SMALL, *chosen, "--out", str(out), "--work", str(tmp_path)]) == 0, (
        STACK_LOG.read_text()[-3000:]
    )
    sections = _sections(out)
    assert set(sections) == set(parts)
    assert all("complete after" in section["notes"][-1] for section in sections.values())
    answers, memory = sections["serve"]["tables"]
    assert all(row["is_equal"] for row in answers["figures"])
    assert {row["share"] for row in answers["figures"]} == {0.85, 0.93}
    assert {row["where"] for row in memory["figures"]} >= {"target", "draft", "gateway"}
    assert not list(tmp_path.glob("hippo-gpu-*"))
    assert "| target |" in (out / "gpu.md").read_text()


def test_a_gpu_that_is_not_here_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device is here" in capsys.readouterr().out
