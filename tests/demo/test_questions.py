"""Clips with questions for ``hippo bench --questions`` and for lmms-eval."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from demo.world import clips, texts
from demo.world.questions import write_questions
from hippo.lab.benchmark.video_questions import read_questions

TASK = Path(__file__).resolve().parents[2] / "examples" / "lmms_eval"


def test_each_clip_has_a_description_and_short_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_questions(tmp_path, num_clips=2)
    questions = read_questions(path)
    assert len({each.id for each in questions}) == 6
    assert {Path(each.video).name for each in questions} == {"mixed-000.mp4", "mixed-001.mp4"}
    described = questions[0]
    assert described.category == "detailed"
    assert described.answer == texts.detailed(clips.held_out("mixed", 0).scene)
    assert described.is_right(described.answer) and not described.is_right("Nothing.")

    spec = importlib.util.spec_from_file_location("lmms_task", TASK / "utils.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(task := importlib.util.module_from_spec(spec))
    monkeypatch.chdir(tmp_path)
    line = json.loads(path.read_text().splitlines()[0])
    assert task.doc_to_visual(line) == [described.video]
    assert task.process_results(line, [f" {line['answer']}\n"]) == {"right": 1.0}
    assert task.process_results(line, ["Nothing."]) == {"right": 0.0}
    text = (TASK / "clips.yaml").read_text()
    assert f"data_files: {path.name}" in text
    assert all(f"utils.{name}" in text for name in ("doc_to_visual", "process_results"))
