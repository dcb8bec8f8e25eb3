"""Questions of published benchmarks, from files in the form in which they are published."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hippo.cli import main
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.benchmark.converters import BENCHMARKS, convert
from hippo.lab.benchmark.video_questions import VideoQuestion, read_questions

# Published records, without fields that are not read.
VIDEO_MME = {
    "duration": "short", "videoID": "fFjv93ACGo8", "question_id": "001-1", "answer": "C",
    "question": "How many apples?", "options": ["A. One.", "B. Two.", "C. Three.", "D. Four."],
}  # fmt: skip
MVBENCH = {
    "video": "ZS9XR.mp4", "question": "What happened after?", "answer": "Held the dish.",
    "candidates": ["Ate the sandwich.", "Held the dish."],
}  # fmt: skip
MLVU = {
    "video": "movie101_66.mp4", "question": "What colour is he?", "question_type": "plotQA",
    "candidates": ["Yellow", "Red"], "answer": "Yellow",
}  # fmt: skip
MLVU_SUMMARY = {
    "video": "217.mp4", "question": "Please summarize the video.", "question_type": "summary",
    "answer": "A lion hunts.",
}  # fmt: skip
LONG_VIDEO_BENCH = {
    "video_path": "86CxyhFV9MI.mp4", "id": "86CxyhFV9MI_0", "question": "Which subtitles appear?",
    "correct_choice": 1, "duration": 190.16, "duration_group": 600,
}  # fmt: skip
LVBENCH_QUESTION = {
    "uid": "2", "answer": "B", "question_type": ["entity recognition", "reasoning"],
    "question": "Who sings?\n(A) The fox\n(B) The cat",
}  # fmt: skip


LVBENCH = {"key": "Cm73ma6Ibcs", "type": "cartoon", "qa": [LVBENCH_QUESTION]}
CAPTION = {"video_name": "v_Sm9f8ZDbJJ8", "question": "Describe it.", "answer": "A man plays."}


def converted(
    folder: Path, benchmark: str, name: str, record: dict[str, Any], video: str
) -> VideoQuestion:
    """The only question of a file with one record, written and read again."""
    annotations, videos = folder / name, folder / "videos"
    (videos / video).parent.mkdir(parents=True)
    (videos / video).touch()
    if annotations.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([record]), annotations)
    else:
        jsonl = annotations.suffix == ".jsonl"
        annotations.write_text(json.dumps(record if jsonl else [record]))
    out = folder / "out.jsonl"
    given = ("--annotations", str(annotations), "--videos", str(videos), "--out", str(out))
    assert main(["questions", benchmark, *given]) == 0
    (question,) = read_questions(out, str(videos))
    assert question.video == str(videos / video)
    return question


_OPTIONS = {"option0": "hi", "option1": "ho", "option2": "N/A", "option3": "N/A", "option4": "N/A"}
_LETTERS = (
    "Which subtitles appear?\nA. hi\nB. ho\n"
    "Answer with the option's letter from the given choices directly."
)


@pytest.mark.parametrize(
    ("benchmark", "name", "record", "video", "facts", "prompt"),
    [
        (
            "video-mme", "test-00000-of-00001.parquet", VIDEO_MME, "data/fFjv93ACGo8.mp4",
            ("001-1", "C", "short", ("One.", "Two.", "Three.", "Four.")),
            "Select the best answer to the following multiple-choice question based on the video. "
            "Respond with only the letter (A, B, C, or D) of the correct option.\n"
            "How many apples?\nA. One.\nB. Two.\nC. Three.\nD. Four.\nThe best answer is:",
        ),
        (
            "mvbench", "action_sequence.json", MVBENCH, "star/Charades_segment/ZS9XR.mp4",
            ("action_sequence-0", "B", "action_sequence", ("Ate the sandwich.", "Held the dish.")),
            "Question:What happened after?\nOption:\n(A) Ate the sandwich.\n(B) Held the dish.\n"
            "Only give the best option.\n",
        ),
        (
            "mlvu", "1_plotQA.json", MLVU, "1_plotQA/movie101_66.mp4",
            ("1_plotQA-0", "A", "plotQA", ("Yellow", "Red")),
            "What colour is he?\n(A) Yellow\n(B) Red\nOnly give the best option.\nBest option: (",
        ),
        # What a model must judge has no answer.
        (
            "mlvu", "9_summary.json", MLVU_SUMMARY, "9_summary/217.mp4",
            ("9_summary-0", None, "summary", ()), MLVU_SUMMARY["question"],
        ),
        (
            "video-detail-caption", "test.parquet", CAPTION, "Test_Videos/v_Sm9f8ZDbJJ8.mkv",
            ("0", None, "", ()), CAPTION["question"],
        ),
        (
            "longvideobench", "lvb_val.json", LONG_VIDEO_BENCH | {"candidates": ["hi", "ho"]},
            "86CxyhFV9MI.mp4", ("86CxyhFV9MI_0", "B", "600 s", ("hi", "ho")), _LETTERS,
        ),
        (
            "longvideobench", "validation-00000-of-00001.parquet", LONG_VIDEO_BENCH | _OPTIONS,
            "86CxyhFV9MI.mp4", ("86CxyhFV9MI_0", "B", "600 s", ("hi", "ho")), _LETTERS,
        ),
        (
            "lvbench", "video_info.meta.jsonl", LVBENCH, "all_videos/Cm73ma6Ibcs.mp4",
            ("2", "B", "entity recognition", ("The fox", "The cat")),
            "Who sings?\n(A) The fox\n(B) The cat\nAnswer the question with the option letter",
        ),
    ],
)  # fmt: skip
def test_records_become_questions(
    tmp_path: Path, benchmark: str, name: str, record: Any, video: str, facts: Any, prompt: str
) -> None:
    found = converted(tmp_path, benchmark, name, record, video)
    assert (found.id, found.answer, found.category, found.options) == facts
    assert found.prompt == prompt


def mvbench(folder: Path, *names: str) -> Path:
    path = folder / "action_sequence.json"
    path.write_text(json.dumps([{**MVBENCH, "video": name} for name in names]))
    return path


def test_missing_videos_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotations = mvbench(tmp_path, *(f"{number}.mp4" for number in range(13)), "1.mp4")
    (tmp_path / "0.mp4").touch()
    out = tmp_path / "out.jsonl"
    given = ["questions", "mvbench", "--annotations", str(annotations), "--videos", str(tmp_path)]
    assert main([*given, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"12 videos are not below {tmp_path}: 1.mp4, 2.mp4" in text and "and 2 more" in text
    assert "1 questions about 1 videos" in text
    assert f"ask them: hippo bench --questions {out} --videos {tmp_path} --answers" in text
    (tmp_path / "0.mp4").unlink()
    out.unlink()
    assert main([*given, "--out", str(out)]) == 1
    assert "nothing is written" in capsys.readouterr().err and not out.exists()


def test_a_name_of_several_videos_needs_its_folder(tmp_path: Path) -> None:
    for folder in ("star", "sta"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.mp4").touch()
    (tmp_path / "sta" / "a.webm").touch()
    found, _ = convert(BENCHMARKS["mvbench"], [mvbench(tmp_path, "sta/a.mp4")], tmp_path)
    assert [line["video"] for line in found] == ["sta/a.mp4"]
    with pytest.raises(InvalidRequestError, match=r"are a\.mp4: sta/a\.mp4, star/a\.mp4"):
        convert(BENCHMARKS["mvbench"], [mvbench(tmp_path, "a.mp4")], tmp_path)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    for text, message in (
        ("{", "a.json cannot be read"),
        ("{}", "is no list of records"),
        (json.dumps([MVBENCH, CAPTION]), "record 2 is not one of MVBench .no field 'candidates'"),
        (json.dumps([{**MVBENCH, "candidates": None}]), "record 1 is not one of MVBench"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match=message):
            convert(BENCHMARKS["mvbench"], [path], tmp_path)
    with pytest.raises(InvalidRequestError, match="there is no folder"):
        convert(BENCHMARKS["mvbench"], [path], tmp_path / "none")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HippoError, match=r"pip install 'hippo-serve\[parquet\]'"):
        convert(BENCHMARKS["video-mme"], [tmp_path / "a.parquet"], tmp_path)
