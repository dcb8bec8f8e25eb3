"""``hippo distill`` whole, on the bundled pair and a few of its clips."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hippo.cli import main
from hippo.cli.stack import BUNDLED_CLIPS, BUNDLED_PAIR
from hippo.lab.commands.distill_run import Distillation
from hippo.lab.distill.training import read_state
from hippo.models.interface.checkpoint import find_checkpoint
from tests.support.devices.threads import one_thread as one_thread
from tests.support.models.families import write_family
from tests.support.models.random_draft import write_random_draft


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos, of which wide.mp4 is held out, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("videos")
    for name in ("handful.mp4", "tray.mp4", "wide.mp4"):
        shutil.copy(BUNDLED_CLIPS / name, folder)
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("distill") / "out"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that learns something from four answers, because it knows nothing."""
    return write_random_draft(BUNDLED_PAIR / "draft", tmp_path_factory.mktemp("random") / "random")


def command(videos: Path, draft: Path, out: Path, *further: str) -> list[str]:
    return [
        "distill", "--target", str(BUNDLED_PAIR / "target"), "--draft", str(draft),
        "--videos", str(videos), "--out", str(out), "--questions-per-video", "2",
        "--max-tokens", "16", "--measured-questions", "1", "--learning-rate", "3e-3",
        "--all-weights", "--epochs", "8", "--accumulate", "1",
        "--max-context-length", "4096", *further,
    ]  # fmt: skip


def test_the_whole_command_after_a_stop(
    videos: Path,
    draft: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out.mkdir()
    (out / "distill.partial").write_text('{"target"')
    with monkeypatch.context() as patched:
        patched.setattr(Distillation, "run", lambda self: None)
        assert main(command(videos, draft, out)) == 0
    (out / "refused.json").write_text('{"tray.mp4#0": "its folder was not mounted"}')
    (out / "training").mkdir()

    assert main(command(videos, draft, out)) == 0
    shown = capsys.readouterr().out
    for stage in ("1  the target answers 8 of 8", "2  the draft's inputs of 6", "3  training on 4"):
        assert stage in shown
    refused = json.loads((out / "refused.json").read_text())
    assert sorted(refused) == ["broken.mp4#0", "broken.mp4#1"]
    report = json.loads((out / "report.json").read_text())
    for figures in (report["before"], report["after"]):
        assert figures["num_equal"] == figures["num_answers"] == 1
        assert figures["tokens_per_forward"] >= 1
    assert report["before"]["agreement"] < report["after"]["agreement"] <= 1
    both = (f"{report[when]['agreement']:.2%}" for when in ("before", "after"))
    assert f"| agreement | {' | '.join(both)} |" in (out / "report.md").read_text()
    assert read_state(out / "training").is_over
    weights = (out / "draft" / "model.safetensors").read_bytes()
    assert weights != (draft / "model.safetensors").read_bytes()
    written = find_checkpoint(str(out / "draft"), progress=lambda stage, share: None)
    source = find_checkpoint(str(draft), progress=lambda stage, share: None)
    assert (written.config, written.num_floats) == (source.config, source.num_floats)
    assert not list(out.rglob("*.partial"))


def test_the_same_command_repeats_nothing(
    videos: Path, draft: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert main(command(videos, draft, out)) == 0
    shown = capsys.readouterr().out
    assert "all 6 answers of the target are there" in shown and "agreement" in shown
    assert "2 refused questions are left out" in shown and f"delete {out / 'training'}, " in shown
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before


def test_other_options_are_refused(
    videos: Path, draft: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, reason in (
        (("--max-tokens", "17"), "was made with max_tokens 16: give the same options, or another"),
        (("--epochs", "4"), "was made with epochs 8.0: delete"),
    ):
        assert main(command(videos, draft, out, *option)) == 1
        assert reason in " ".join(capsys.readouterr().err.split())


def test_a_draft_without_its_training_is_refused(
    videos: Path, draft: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = tmp_path / "rest"
    shutil.copytree(out, rest, ignore=shutil.ignore_patterns("training", "examples"))
    assert main(command(videos, draft, rest)) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{rest / 'draft'} exists without the training that made it" in error
    assert f"delete {rest / 'training'}, {rest / 'draft'}, {rest / 'after.json'} to" in error


def test_what_cannot_be_trained_is_refused_at_once(
    videos: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_family(tmp_path / "other", "qwen2_vl")
    strange = write_family(tmp_path / "strange", "qwen2_5_vl")
    quantised = tmp_path / "quantised"
    shutil.copytree(draft, quantised)
    config = json.loads((quantised / "config.json").read_text())
    text = json.dumps({**config, "quantization_config": {"quant_method": "awq"}})
    (quantised / "config.json").write_text(text)
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("mine")
    new = tmp_path / "new"
    for wrong, reason in (
        (("--out", str(full)), "has other content"),
        (("--draft", str(other)), "the draft other is a qwen2_vl"),
        (("--draft", str(strange)), "the vocabularies of strange and target differ"),
        (("--draft", str(quantised)), "the draft quantised is quantised"),
        (("--videos", str(full)), "has no videos"),
        (("--lora-rank", "4"), "--lora-rank has no effect with --all-weights"),
        (("--pruning-ratio", "1"), "--pruning-ratio must be 0 to 0.99"),
        (("--temperatures", "a"), "expected numbers of 0 to 2"),
    ):
        assert main(command(videos, draft, new, *wrong)) == 1
        assert reason in " ".join(capsys.readouterr().err.split())
    assert os.listdir(full) == ["letter.txt"] and not new.exists()
