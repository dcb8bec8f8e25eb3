"""AIPerf, where it is installed (it is not among the development dependencies)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from hippo.cli.stack import BUNDLED_PAIR
from tests.e2e.support import Running, data_url

AIPERF = shutil.which("aiperf")


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed")
def test_aiperf_measures_the_gateway(running: Running, clip: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    question = {"text": "Describe the video.", "video": data_url(clip)}
    questions.write_text((json.dumps(question) + "\n") * 2, encoding="utf-8")
    done = subprocess.run(
        [
            str(AIPERF), "profile", "--url", running.url, "--model", "hippo",
            "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(BUNDLED_PAIR / "target"), "--use-server-token-count",
            "--input-file", str(questions), "--custom-dataset-type", "single_turn",
            "--concurrency", "2", "--request-count", "6",
            "--extra-inputs", "max_tokens:16", "--ui", "none", "--artifact-dir", str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert figures["request_count"]["avg"] == 6
    assert figures["time_to_first_token"]["avg"] > 0
