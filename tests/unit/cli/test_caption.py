"""``hippo caption`` against a server that begins to refuse; the pictures of a recording."""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hippo.cli import main
from hippo.cli.ask import ask
from hippo.cli.record import pictures
from hippo.client.requests import RequestForm, question_about
from hippo.client.server import Server
from tests.support.clips import video
from tests.support.running.plain_server import PlainServer, serving

NAMES = ["a.mp4", "b.mp4", "c.mp4", "d.mp4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "videos"
    found.mkdir()
    for name in NAMES:
        (found / name).write_bytes(b"a video to a server that looks at none")
    return found


def _command(plain: PlainServer, folder: Path, out: Path) -> list[str]:
    return [
        *("caption", str(folder), "--out", str(out), "--url", plain.url),
        *("--prompt", "What is there?", "--concurrency", "1"),
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_everything_ends_the_run_with_one_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    out = tmp_path / "captions.jsonl"
    # The first request is the probe, the second one is about a.mp4.
    with serving(PlainServer(failing=range(2, 100), failing_status=status)) as plain:
        assert main(_command(plain, folder, out)) == 1
        told = capsys.readouterr()
        assert [line["path"] for line in _lines(out)] == NAMES[:1]
        assert "1 answered, 0 failed, 3 left; the same command goes on" in told.out
        assert told.err.count(f"the server answered {status}") == 1
        plain.failing = ()
        assert main(_command(plain, folder, out)) == 0
    assert [line["path"] for line in _lines(out)] == NAMES
    assert all("answer" in line for line in _lines(out))


@pytest.mark.parametrize("status", [403, 404])
def test_a_file_that_is_refused_alone_gets_a_line(
    folder: Path, tmp_path: Path, status: int
) -> None:
    out = tmp_path / "captions.jsonl"
    with serving(PlainServer(failing=(2,), failing_status=status)) as plain:
        assert main(_command(plain, folder, out)) == 1
    lines = _lines(out)
    assert [line["path"] for line in lines] == NAMES
    assert [line["path"] for line in lines if "error" in line] == ["b.mp4"]


def test_the_lines_of_a_model_that_thinks_have_its_thoughts_apart(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "captions.jsonl"
    with serving(PlainServer(thought="Hm.\n", pieces=["\n\n", "A ball."])) as plain:
        assert main([*_command(plain, folder, out), "--no-thinking"]) == 0
    for line in _lines(out):
        assert (line["answer"], line["reasoning"]) == ("A ball.", "Hm.\n")
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in plain.bodies)


def test_a_thought_that_took_all_tokens_is_no_answer(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "captions.jsonl"
    with serving(PlainServer(thought="Hm, ", pieces=[], finish_reason="length")) as plain:
        main(_command(plain, folder, out))
    assert all("raise it, or --no-thinking" in line["error"] for line in _lines(out))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_thought_is_dim_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    form = RequestForm(model="plain", max_tokens=8, temperature=0.0)
    with serving(PlainServer(thought="Hm.", pieces=["Yes."])) as plain:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
        answer = ask(Server(plain.url), form.request(question_about("Is it?")).body())
    assert (answer.thought, answer.text) == ("Hm.", "Yes.")
    shown = "\x1b[2mHm.\x1b[22mYes.\n" if is_terminal else "Hm.Yes.\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("container", ["mp4", "mpegts"])  # a transport stream does not start at 0
def test_pictures_are_those_of_the_seconds_after_the_first_frame(
    tmp_path: Path, container: str
) -> None:
    clip = video(container=container)
    path = tmp_path / "clip"
    path.write_bytes(clip.data)
    seen: list[int] = []
    for url in pictures(str(path), [0.0, 0.5, 1.25]):
        with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
            level = image.convert("L").getpixel((image.width // 2, image.height // 2))
        assert isinstance(level, int)
        seen.append(round((level - 40) / 12))
    assert seen == [0, 4, 10]
