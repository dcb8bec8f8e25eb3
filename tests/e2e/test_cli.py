"""The command line, as separate processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from hippo.cli import main
from tests.e2e.support import (
    CHAT,
    Running,
    chat_body,
    free_port,
    hippo,
    plain_client,
    readiness,
    wait_until,
)


@contextmanager
def _up(log: Path, pair: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    models = ["--target-model", pair["target"], "--draft-model", pair["draft"]]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "hippo.cli", "up", *models, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def _children(pid: int) -> list[int]:
    """Those that it has; none after its end."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_ask_streams_an_answer_and_a_line_of_figures(running: Running, clip: Path) -> None:
    done = hippo("ask", str(clip), "What happens?", "--url", running.url, "--max-tokens", "12")
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


def test_up_shows_the_last_lines_of_a_process_that_ends_and_leaves_nothing(
    pair: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    log = tmp_path / "log"
    with _up(log, {**pair, "draft": str(broken)}, "--port", "0") as process:
        wait_until(lambda: len(_children(process.pid)) >= 2 or process.poll() is not None)
        children = _children(process.pid)
        assert children, log.read_text()
        process.wait(60)
        wait_until(lambda: not any(map(_is_alive, children)))
    assert process.returncode == 1
    assert "the draft process ended" in log.read_text()
    assert "its last lines:" in log.read_text()


def test_up_serves_until_it_is_stopped_also_while_its_draft_is_dead_and_leaves_nothing(
    pair: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _up(log, pair, "--port", str(port)) as process:
        wait_until(lambda: b"ready at" in log.read_bytes() or process.poll() is not None)
        children = _children(process.pid)
        assert len(children) == 3, log.read_text()
        draft = next(
            child for child in children if "services.draft" in psutil.Process(child).cmdline()
        )
        psutil.Process(draft).kill()
        wait_until(lambda: b"the draft process ended (signal 9)" in log.read_bytes())
        with plain_client(url) as client:
            body = chat_body(None, 4, speculative={"policy": "optimistic"})
            answer = client.post(CHAT, json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["hippo"]["draft_used"] is False
        wait_until(lambda: b"the draft is started again" in log.read_bytes())
        wait_until(lambda: (readiness(url) or {}).get("draft") == "ready")
        children = _children(process.pid)
        assert len(children) == 3 and draft not in children, log.read_text()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        wait_until(lambda: not any(map(_is_alive, children)))
    assert process.returncode == 0
    assert b"stopped" in log.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_that_still_loads_leaves_nothing(
    pair: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with _up(log, pair, "--port", "0") as process:
        wait_until(lambda: len(_children(process.pid)) == 3 or process.poll() is not None)
        children = _children(process.pid)
        process.send_signal(number)
        process.wait(60)
        wait_until(lambda: not any(map(_is_alive, children)))


@pytest.mark.parametrize("command", [[], ["up"], ["ask"], ["bench"], ["demo"]])
def test_help_teaches_with_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert "examples:" in capsys.readouterr().out
