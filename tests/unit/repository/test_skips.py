"""With HIPPO_NO_SKIPS=1 a test is left out only for a reason that a machine of CI can have."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]


# Each is to be seen in a report of the run, under its name.
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="promtool is not installed")
def test_unexplained_mark(): pass

def test_unexplained_call(): pytest.skip("promtool is not installed")

def test_unexplained_end(): pytest.skip("needs a CUDA device, or to be written")

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_explained_mark(): pass

def test_explained_call(): pytest.skip("the base image x:1 cannot be had")

@pytest.mark.xfail
def test_explained_failure(): raise ValueError

def test_passes(): pass
"""
FILE = 'import pytest\npytest.skip("promtool is not installed", allow_module_level=True)\n'


def outcomes(folder: Path) -> dict[str, str]:
    """By test or file: its outcome in a run of pytest with the hooks of tests/conftest.py."""
    (folder / "conftest.py").write_text(
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
    )
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_unexplained_file.py").write_text(FILE)
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}",
         "--continue-on-collection-errors", "--rootdir", folder, folder],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "HIPPO_NO_SKIPS": "1",
             "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, timeout=60,
    )  # fmt: skip
    return {
        str(case.get("name")): case[0].tag if len(case) else "passed"
        for case in ElementTree.parse(report).iter("testcase")
    }


def test_a_skip_that_is_not_explained_is_a_failure(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    assert len(found) == 8
    assert found.pop("test_passes") == "passed"
    for name, outcome in found.items():
        expected = ("skipped",) if name.startswith("test_explained") else ("failure", "error")
        assert outcome in expected, name
