"""Every program in examples/, run as its README says, against the running stack."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.support import Running, data_url, video_message

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
QUESTION = 'What does "moving" mean here?'  # with signs that must be escaped
FIRST, SECOND = "What is in the video?", "What moves?"


def _run(running: Running, *command: str | Path, given: dict[str, str] | None = None) -> str:
    """What an example prints; where the server is, it is told by the environment."""
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{running.url}/v1",
        "OPENAI_API_KEY": "unused",
        "LANGSMITH_TRACING": "false",
        **(given or {}),
    }
    parts = [str(part) for part in command]
    done = subprocess.run(parts, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _ask(running: Running, messages: list[dict[str, Any]]) -> str:
    body = {"model": "hippo", "messages": messages, "temperature": 0}
    url = f"{running.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=60).raise_for_status().json()
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def expected(running: Running) -> str:
    """The answer that every example is to get."""
    text = _ask(running, [video_message(data_url(running.clip), QUESTION)])
    assert text
    return text


def test_curl_streams_an_answer(running: Running, clip: Path, expected: str) -> None:
    lines = _run(running, EXAMPLES / "curl" / "ask.sh", clip, QUESTION).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected


def test_curl_uploads_a_video_and_asks_about_it_twice(
    running: Running, clip: Path, expected: str
) -> None:
    printed = _run(running, EXAMPLES / "curl" / "upload.sh", clip, QUESTION, QUESTION)
    *answers, deleted = map(json.loads, printed.splitlines())
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [expected, expected]
    assert deleted["deleted"] is True


def test_curl_fails_with_the_servers_words(running: Running, clip: Path) -> None:
    with pytest.raises(AssertionError, match="no model 'other'"):
        _run(running, EXAMPLES / "curl" / "ask.sh", clip, given={"HIPPO_MODEL": "other"})


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_python_asks(running: Running, clip: Path, expected: str, options: tuple[str, ...]) -> None:
    program = EXAMPLES / "python" / "ask.py"
    assert _run(running, sys.executable, program, clip, QUESTION, *options) == expected + "\n"


def test_python_uploads_and_talks_in_several_turns(running: Running, clip: Path) -> None:
    printed = _run(running, sys.executable, EXAMPLES / "python" / "chat.py", clip, FIRST, SECOND)
    messages = [video_message(data_url(clip), FIRST)]
    first = _ask(running, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": SECOND}]
    assert printed == f"> {FIRST}\n{first}\n> {SECOND}\n{_ask(running, messages)}\n"


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
)
def test_langchain_asks(running: Running, clip: Path, expected: str) -> None:
    program = EXAMPLES / "langchain" / "ask.py"
    assert _run(running, sys.executable, program, clip, QUESTION) == expected + "\n"


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node example with what its lock file names."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.skip(f"node is {version.strip()}; the example is for 20 and later")
    folder = tmp_path_factory.mktemp("node")
    for path in (EXAMPLES / "node").iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    install = [npm, "ci", "--no-audit", "--no-fund"]
    try:
        installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=60)
        problem = "" if installed.returncode == 0 else installed.stderr
    except subprocess.TimeoutExpired:
        problem = "network timeout"
    if any(sign in problem for sign in ("ENOTFOUND", "ECONNREFUSED", "EAI_AGAIN", "network")):
        pytest.skip(f"npm's registry cannot be reached: {problem.strip()}")
    assert problem == ""
    return folder


def test_node_asks(running: Running, clip: Path, expected: str, node_folder: Path) -> None:
    assert _run(running, "node", node_folder / "ask.mjs", clip, QUESTION) == expected + "\n"
