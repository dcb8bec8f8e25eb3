"""The command line: asking, starting, and captions of a folder with a broken file."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from hippo.cli import main
from hippo.cli.stack import BUNDLED_CLIPS
from hippo.client.server import Connection, Server
from hippo.client.uploads import sent_media
from hippo.errors import InvalidRequestError
from tests.e2e.support import Running, free_port, hippo, jpeg_frame, wait_until


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


@pytest.mark.timeout(300)  # a further pair starts, beside other tests
def test_the_demo_measures_the_bundled_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)  # of this process, too
    done = hippo("demo", "--repeats", "1", "--max-tokens", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    (clip, *_) = sorted(BUNDLED_CLIPS.glob("*.mp4"))
    assert f"{clip.name}: Describe the video." in done.stdout and "decode ×" in done.stdout
    assert "Outputs are equal." in done.stdout


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


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["color", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos, an image, a broken video, and a file that is neither."""
    found = tmp_path_factory.mktemp("videos")
    (found / "sub folder").mkdir()
    shutil.copy(running.clip, found / "a.mp4")
    shutil.copy(running.clip, found / "sub folder" / "b.MP4")
    (found / "c.jpg").write_bytes(jpeg_frame(1))
    (found / "broken.mp4").write_bytes(b"no video" * 100)
    (found / "notes.txt").write_text("not asked about")
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _command(running: Running, folder: Path, out: Path, *further: str) -> list[str]:
    return [
        *("caption", str(folder), "--out", str(out), "--url", running.url),
        *("--prompt", "What is there?", "--max-tokens", "12", *further),
    ]


def test_every_file_gets_a_line_and_a_second_run_goes_on(
    running: Running, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "captions.jsonl"
    command = _command(running, folder, out, "--concurrency", "3")
    assert main(command) == 1
    lines = {line["path"]: line for line in _lines(out)}
    assert sorted(lines) == ["a.mp4", "broken.mp4", "c.jpg", "sub folder/b.MP4"]
    broken = lines.pop("broken.mp4")
    assert set(broken) == {"path", "error", "seconds", "request"} and "400" in broken["error"]
    for line in lines.values():
        assert set(line) == {
            "path", "answer", "finish_reason", "usage", "seconds", "request"
        }  # fmt: skip
        assert line["answer"] and 0 < line["usage"]["completion_tokens"] <= 12
    assert lines["a.mp4"]["answer"] == lines["sub folder/b.MP4"]["answer"]
    told = capsys.readouterr().out
    assert "4 files: 3 answered, 1 failed\n" in told and "failed: broken.mp4: " in told
    assert "left out, not known as videos or images: 1 .txt" in told

    # A stop in the middle of a line, of which nothing is left.
    whole = out.read_bytes()
    kept = b"".join(line for line in whole.splitlines(True) if b"sub folder" not in line)
    out.write_bytes(kept + b'{"path": "sub fo')
    assert main(command) == 1
    assert out.read_bytes().startswith(kept) and len(_lines(out)) == 4
    assert "3 of 4 files have a line" in capsys.readouterr().out

    # The broken file is mended.
    (folder / "broken.mp4").write_bytes(running.clip.read_bytes())
    try:
        assert main(command) == 1
        assert main([*command, "--retry-errors"]) == 0
    finally:
        (folder / "broken.mp4").write_bytes(b"no video" * 100)
    assert len(_lines(out)) == 5
    assert _lines(out)[-1]["answer"] == lines["a.mp4"]["answer"]
    whole = out.read_bytes()
    assert main([*command, "--seed", "5"]) == 1
    assert out.read_bytes() == whole
    told = " ".join(capsys.readouterr().err.split())  # lines are wrapped anywhere
    assert "asked with another prompt, model, schema or option" in told


def test_answers_by_a_schema_are_parsed_and_those_cut_off_are_errors(
    running: Running, folder: Path, tmp_path: Path
) -> None:
    schema = tmp_path / "scene.json"
    schema.write_text(json.dumps(SCHEMA))
    found = {}
    for limit in ("40", "3"):
        out = tmp_path / f"{limit}.jsonl"
        command = _command(running, folder, out, "--schema", str(schema), "--policy", "off")
        assert main([*command, "--max-tokens", limit]) == 1
        found[limit] = {line["path"]: line for line in _lines(out)}
    parsed = found["40"]["a.mp4"]["parsed"]
    assert list(parsed) == ["color", "count"] and parsed["color"] in ("red", "blue")
    assert json.loads(found["40"]["a.mp4"]["answer"]) == parsed
    assert "ended by 'length', is no JSON" in found["3"]["a.mp4"]["error"]


def test_files_are_named_by_path_for_a_server_that_may_open_them(
    running: Running, tmp_path: Path
) -> None:
    out = tmp_path / "captions.jsonl"
    folder = running.clip.parent / "captions"
    folder.mkdir()
    shutil.copy(running.clip, folder / "clip.mp4")
    assert main(_command(running, folder, out, "--by-path")) == 0
    assert [line["path"] for line in _lines(out)] == ["clip.mp4"]


def test_a_video_too_large_for_a_request_is_uploaded_or_gets_a_line(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    shutil.copy(running.clip, folder / "a.mp4")
    # More than the gateway takes, and than the sockets hold before it refuses.
    (folder / "b.mp4").write_bytes(bytes(24 << 20))
    found = {}
    for largest in (0, 1 << 30):
        monkeypatch.setattr("hippo.client.uploads.LARGEST_INLINE", largest)
        out = tmp_path / f"{largest}.jsonl"
        assert main(_command(running, folder, out, "--concurrency", "1")) == 1
        found[largest] = {line["path"]: line for line in _lines(out)}
    uploaded, inline = found.values()
    assert uploaded["a.mp4"]["answer"] == inline["a.mp4"]["answer"]
    for lines in (uploaded, inline):
        assert "the server answered 413" in lines["b.mp4"]["error"]
    assert "the video is larger" in uploaded["b.mp4"]["error"]
    assert "the request body is larger" in inline["b.mp4"]["error"]


def test_an_upload_lasts_as_long_as_its_answers(
    running: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hippo.client.uploads.LARGEST_INLINE", 0)
    server = Server(running.url)
    with closing(server.connect()) as connection:
        with sent_media(server, str(running.clip)) as video_id:
            status, card = connection.exchange("GET", f"/videos/{video_id}")
            assert (status, json.loads(card)["bytes"]) == (200, running.clip.stat().st_size)
        assert connection.exchange("GET", f"/videos/{video_id}")[0] == 404
    for other in ("https://example.com/a.mp4", "data:video/mp4;base64," + "A" * 5000, "a" * 5000):
        with sent_media(server, other) as media:
            assert media == other

    asked = ["ask", str(running.clip), "What is there?", "--url", running.url]
    assert main([*asked, "--max-tokens", "8"]) == 0
    assert "8 tokens in" in capsys.readouterr().out

    growing = Path(shutil.copy(running.clip, tmp_path / "growing.mp4"))

    class Slow(Connection):
        def _request(self, *sent: Any) -> httpx.Request:
            request = super()._request(*sent)
            growing.write_bytes(growing.read_bytes() + b"x")
            return request

    with closing(Slow(server)) as connection:
        with pytest.raises(InvalidRequestError, match="was changed while it was sent"):
            connection.exchange("POST", "/videos", growing)
        with pytest.raises(InvalidRequestError, match="none cannot be read: No such file"):
            connection.exchange("POST", "/videos", tmp_path / "none")
        assert connection.exchange("GET", "/models")[0] == 200


def test_what_cannot_be_asked_is_said_at_once(
    running: Running, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, notes = tmp_path / "captions.jsonl", tmp_path / "notes.txt"
    notes.write_text("mine")
    for command, told in (
        (_command(running, folder, out, "--concurrency", "0"), "--concurrency must be at least 1"),
        (_command(running, folder, out, "--schema", "scene.txt"), "scene.txt cannot be read"),
        (_command(running, folder, out, "--model", "other"), "there is no model 'other'"),
        (_command(running, folder, notes), "is no file of captions"),
        (_command(running, tmp_path, out), "there are no videos or images below"),
    ):
        assert main(command) == 1
        assert told in capsys.readouterr().err
        assert not out.exists()
    assert notes.read_text() == "mine"


def test_a_stop_ends_cleanly_and_a_lost_server_is_named(
    running: Running, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(40):
        shutil.copy(running.clip, many / f"{number:02}.mp4")
    out = tmp_path / "captions.jsonl"
    command = _command(running, many, out, "--concurrency", "2")
    with subprocess.Popen(
        [sys.executable, "-m", "hippo.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "left; the same command goes on" in told
    assert all("answer" in line for line in _lines(out))
    wait_until(lambda: running.slots_used() == 0)
    gone = [*command, "--url", f"http://127.0.0.1:{free_port()}"]
    assert main(gone) == 1
    assert "nothing listens" in capsys.readouterr().err
