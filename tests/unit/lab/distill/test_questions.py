"""Which questions are asked about which videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hippo.errors import InvalidRequestError
from hippo.lab.distill.questions import asked_about, plan_questions


def videos(folder: Path, count: int) -> Path:
    (folder / "below").mkdir()
    for number in range(count):
        (folder / "below" / f"{number}.MP4").write_bytes(b"")
    (folder / "notes.txt").write_text("no video")
    return folder


def test_a_share_of_the_videos_is_held_out_with_all_questions(tmp_path: Path) -> None:
    asked = asked_about(videos(tmp_path, 20), None, num_default=3)
    assert len(asked) == 60 and len({name for name, *_ in asked}) == 60
    options = {"ratio": 0.9, "temperatures": (0.0, 0.7), "held_out_share": 0.1, "seed": 3}
    planned = plan_questions(asked, **options)  # type: ignore[arg-type]
    held_out = [each for each in planned if each.is_held_out]
    others = [each for each in planned if not each.is_held_out]
    assert planned == held_out + others
    assert planned == plan_questions(asked, **options)  # type: ignore[arg-type]
    assert len({each.video for each in held_out}) == 2 and len(held_out) == 6
    assert not {each.video for each in held_out} & {each.video for each in others}
    assert {(each.ratio, each.temperature) for each in held_out} == {(0.9, 0.0)}
    assert len(others) == 2 * 54 and len({each.id for each in planned}) == len(planned)
    ratios = [each.ratio for each in others]
    assert min(ratios) == 0.0 and ratios.count(0.9) > 20 and max(ratios) <= 0.95
    assert all(ratio == 0 or ratio >= 0.8 for ratio in ratios)


def test_questions_of_a_file_are_about_files_here(tmp_path: Path) -> None:
    folder = videos(tmp_path, 2)
    file = tmp_path / "q.jsonl"
    lines = [{"id": "a", "video": "below/0.MP4", "question": "What?"}]
    file.write_text(json.dumps(lines[0]))
    assert asked_about(folder, file, num_default=3) == [("a", folder / "below/0.MP4", "What?")]
    file.write_text(json.dumps({"id": "a", "video": "https://a.org/b.mp4", "question": "What?"}))
    with pytest.raises(InvalidRequestError, match="give files of this machine"):
        asked_about(folder, file, num_default=3)


def test_there_must_be_two_videos(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        asked_about(tmp_path / "none", None, num_default=1)
    with pytest.raises(InvalidRequestError, match="has no videos"):
        asked_about(tmp_path, None, num_default=1)
    asked = asked_about(videos(tmp_path, 1), None, num_default=3)
    with pytest.raises(InvalidRequestError, match="give two videos at least"):
        plan_questions(asked, ratio=0.9, temperatures=(0.0,), held_out_share=0.5, seed=0)
