"""A command that lacks a package says in one sentence what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hippo.base.extras import needs_extra
from hippo.errors import HippoError

ROOT = Path(__file__).resolve().parents[3]
CLIP = str(ROOT / "demo/clips/handful.mp4")
TARGET, DRAFT = str(ROOT / "demo/models/target"), str(ROOT / "demo/models/draft")
DISTILL = ("hippo.cli", "distill", "--target", TARGET, "--draft", DRAFT, "--videos", "clips")
ENGINE = ("accelerate", "av", "huggingface_hub", "numpy", "PIL", "psutil", "torch", "transformers")


@pytest.mark.parametrize(
    ("missing", "command", "sentence"),
    [
        (
            ENGINE,
            ("services.draft", "--model", DRAFT),
            "error: the draft service needs {}: pip install 'hippo-serve[engine]'",
        ),
        (
            ENGINE,
            ("services.target", "--model", TARGET),
            "error: the target service needs {}: pip install 'hippo-serve[engine]'",
        ),
        (
            ENGINE,
            ("hippo.cli", "inspect", CLIP),
            "error: `hippo inspect` runs the target here and needs {}: "
            "pip install 'hippo-serve[engine]'",
        ),
        (
            ENGINE,
            (*DISTILL, "--all-weights", "--out", "trained"),
            "error: `hippo distill` needs {}: pip install 'hippo-serve[distill]'",
        ),
        (
            ("peft",),
            (*DISTILL, "--out", "trained"),
            "error: adapters need {}: pip install 'hippo-serve[distill]', or give --all-weights",
        ),
        (
            ("matplotlib",),
            ("hippo.cli", "bench", "--plot", "bench.svg"),
            "error: a plot needs {}: pip install 'hippo-serve[plots]', or leave --plot out",
        ),
    ],
    ids=["draft", "target", "inspect", "distill", "adapters", "plots"],
)
def test_a_command_says_what_to_install(
    tmp_path: Path, missing: tuple[str, ...], command: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "clips").mkdir()
    module, *arguments = command
    program = (
        "import importlib.util, runpy, sys\n"
        f"missing = {missing!r}\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *_: None if name in missing else find(name, *_)\n"
        f"sys.argv = {[module, *arguments]!r}\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    said = done.stderr.strip()
    assert said in [sentence.format(package) for package in missing]


def test_a_broken_package_is_no_missing_one() -> None:
    with pytest.raises(ImportError, match="libcuda"), needs_extra("engine", "this"):
        raise ImportError("libcuda.so.1: cannot open shared object file", name="torch")


def test_an_own_module_that_is_missing_is_our_fault() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("engine", "this"):
        raise ModuleNotFoundError("No module named 'hippo.nowhere'", name="hippo.nowhere")


def test_what_else_can_be_done_is_said() -> None:
    sentence = r"^this needs nowhere: pip install 'hippo-serve\[engine\]', or do that$"
    with (
        pytest.raises(HippoError, match=sentence),
        needs_extra("engine", "this", or_else="do that"),
    ):
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
