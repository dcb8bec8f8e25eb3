"""The command line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hippo.cli import main
from tests.e2e.support import Running, free_port, hippo


def test_ask_streams_an_answer_and_a_line_of_figures(running: Running, clip: Path) -> None:
    command = ["ask", str(clip), "What happens?", "--url", running.url, "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "hippo.cli", *command], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ tokens in [\d.]+ s; first after .* policy adaptive", done.stdout)


def test_ask_compares_with_the_target_alone(running: Running, clip: Path) -> None:
    done = hippo(
        "ask", str(clip), "What happens?", "--url", running.url, "--max-tokens", "24",
        "--policy", "optimistic", "--compare", "--repeats", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["figures"]["policy"] == "optimistic"
    assert result["comparison"]["is_equal"] is True
    alone, pair = result["comparison"]["summary"]
    assert (alone["system"], pair["system"]) == ("target-only", "optimistic")
    assert pair["decode_speedup"]["mean"] > 0 and pair["num_answers"] == 1


def test_ask_takes_a_question_alone(running: Running) -> None:
    done = hippo("ask", "Hello?", "--url", running.url, "--max-tokens", "4", "--json")
    assert json.loads(done.stdout)["num_tokens"] <= 4


def test_ask_says_what_is_wrong(running: Running, tmp_path: Path) -> None:
    missing = hippo("ask", str(tmp_path / "none.mp4"), "What?", "--url", running.url)
    assert missing.returncode == 1
    assert "none.mp4 cannot be read: No such file or directory" in missing.stderr
    nobody = hippo("ask", "What?", "--url", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1
    assert "start a pair with `hippo up`" in nobody.stderr
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    refused = hippo("ask", str(text), "What?", "--url", running.url)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")


def test_up_names_a_taken_port_and_a_missing_model(pair: dict[str, str], tmp_path: Path) -> None:
    models = ["--target-model", pair["target"], "--draft-model", pair["draft"]]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = hippo("up", *models, "--port", port)
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in done.stderr
    assert "--port" in done.stderr
    done = hippo("up", "--target-model", str(tmp_path / "none"), "--draft-model", pair["draft"])
    assert done.returncode == 1
    assert f"there is no target model at {tmp_path / 'none'}" in done.stderr


@pytest.mark.parametrize("command", [[], ["up"], ["ask"], ["bench"], ["demo"]])
def test_help_teaches_with_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert "examples:" in capsys.readouterr().out
