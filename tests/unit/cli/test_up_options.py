"""What the options of ``hippo up`` come to."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hippo.cli.processes import Child
from hippo.cli.stack import Stack
from hippo.cli.up import add_stack_arguments, stack_options
from services.draft.config import DraftSettings
from services.target.config import TargetSettings


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        ((), "float32", "auto"),
        (("--dtype", "bfloat16"), "bfloat16", "auto"),
        (("--dtype", "bfloat16", "--draft-dtype", "float32"), "bfloat16", "float32"),
        (("--target-device", "cuda:0"), "auto", "auto"),
        (("--dtype", "bfloat16", "--draft-device", "cuda:1"), "bfloat16", "bfloat16"),
    ],
)
def test_a_draft_has_the_targets_dtype_unless_it_is_on_a_cpu(
    given: tuple[str, ...], target: str, draft: str
) -> None:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser, port=0)
    options = stack_options(parser.parse_args(given))
    with Stack(options, lambda name, line: None) as stack:
        for name, expected in (("target", target), ("draft", draft)):
            arguments = stack._arguments(name)
            assert arguments[arguments.index("--dtype") + 1] == expected


def test_the_services_open_the_directories_of_requests_and_uploads(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_stack_arguments(parser, port=0)
    given = parser.parse_args(("--allowed-local-media-path", f"{tmp_path},/usr"))
    with Stack(stack_options(given), lambda name, line: None) as stack:

        def value(name: str, flag: str) -> str:
            arguments = stack._arguments(name)
            return arguments[arguments.index(flag) + 1]

        uploads = value("gateway", "--upload-dir")
        assert Path(uploads).is_dir()
        assert value("gateway", "--allowed-local-media-path") == f"{tmp_path},/usr"
        for name in ("target", "draft"):
            assert value(name, "--allowed-local-media-path") == f"{uploads},{tmp_path},/usr"


def test_auto_is_half_precision_for_a_draft_alone() -> None:
    plans = [settings(model="a").load_plan for settings in (DraftSettings, TargetSettings)]
    assert [(plan.dtype, plan.auto_is_half) for plan in plans] == [("auto", True), ("auto", False)]


def test_a_childs_environment_is_the_parents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIPPO_SAID", "there")
    (tmp_path / "saying.py").write_text("import os\nprint(os.environ['HIPPO_SAID'])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    printed: list[str] = []
    child = Child("saying", lambda name, line: printed.append(line))
    child.start("saying", ())
    assert child.wait(30)
    assert printed == ["there"]
