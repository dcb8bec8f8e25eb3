"""What the end-to-end tests share: clips, slots, a plain web server, requests."""

import base64
import contextlib
import functools
import http.server
import io
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from PIL import Image

from hippo.cli import main
from hippo.cli.processes import Child
from tests.fuzz.corpus import encode
from tests.support.running.stack import RunningStack, fetch, free_port

__all__ = ["free_port"]  # and all that is defined here

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 20261121}


@dataclass(frozen=True, slots=True)
class Running(RunningStack):
    """The stack of all tests, and what it may read."""

    media_folder: Path
    clip: Path
    max_context_length: int


@dataclass(frozen=True, slots=True)
class Door:
    """A further gateway before the running services."""

    url: str
    child: Child

    def client(self) -> httpx.Client:
        return plain_client(self.url)


def plain_client(url: str) -> httpx.Client:
    """A client without proxies; and without certificates, whose reading takes 20 ms."""
    return httpx.Client(base_url=url, trust_env=False, verify=False, timeout=60)


def official_client(url: str, api_key: str = "unused") -> openai.OpenAI:
    """The official client, which tries nothing again."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=60)


def hippo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of ours to its end, in this process."""
    on_term = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        try:
            code = main(arguments)
        finally:
            signal.signal(signal.SIGTERM, on_term)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def process(module: str, *arguments: str, lines: list[str] | None = None) -> Iterator[Child]:
    """``python -m module``, stopped at the end; ``lines`` is what it logs."""
    child = Child(module, lambda _, line: None if lines is None else lines.append(line))
    child.start(module, list(arguments))
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(20)


@contextlib.contextmanager
def further_gateway(
    running: Running, *arguments: str, lines: list[str] | None = None
) -> Iterator[Door]:
    """Ready at the start, stopped at the end; the last of an option's values counts."""
    port, stack = free_port(), running.stack
    services = (
        *("--target", f"127.0.0.1:{stack.port('target')}"),
        *("--draft", f"127.0.0.1:{stack.port('draft')}"),
        *("--calibration-share", "0"),
    )
    with process("gateway", "--port", str(port), *services, *arguments, lines=lines) as child:
        door = Door(f"http://127.0.0.1:{port}", child)
        wait_until(lambda: readiness(door.url) is not None)
        yield door


def readiness(url: str) -> dict[str, Any] | None:
    """What a gateway that is ready says; None until it is."""
    try:
        answer = fetch(f"{url}/ready")
    except httpx.HTTPError:
        return None
    return dict(answer.json()) if answer.status_code == 200 else None


def chat_body(url: str | None, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy request for so many tokens about a video, or of a greeting."""
    hello = {"role": "user", "content": "Hello"}
    return {
        "model": "hippo",
        "messages": [hello if url is None else video_message(url)],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        **GREEDY,
        **fields,
    }


def ask(client: openai.OpenAI, url: str | None = None, **fields: Any) -> Any:
    """The official client's answer about a video, or to a greeting: greedy unless asked else."""
    create: Any = client.chat.completions.create  # whose types know no further options
    turn = {"role": "user", "content": "Tell me something."} if url is None else video_message(url)
    return create(**{"model": "hippo", "messages": [turn], **GREEDY, **fields})


def streamed(
    client: httpx.Client, body: dict[str, Any], at_fifth: Callable[[], None]
) -> list[dict[str, Any]]:
    """The events of a streamed answer; ``at_fifth`` is called in its middle."""
    chunks = []
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        for chunk in chunks_of(response):
            chunks.append(chunk)
            if len(chunks) == 5:
                at_fifth()
    return chunks


def chunks_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer but the last, as they come."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[len("data: ") :])


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text that they carry; none in an error's."""
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk.get("choices", ())
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls; the test's timeout ends it. Rarely, since asking takes time from who is asked."""
    while not condition():
        time.sleep(0.05)


def _square(number: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    left = 5 * number % (width - 30)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[20:50, left : left + 30] = (255, 0, 0)
    return pixels


def write_clip(path: Path, *, num_frames: int = 16) -> Path:
    """A square that moves to the right over a black background, as H.264 in mp4."""
    size: dict[str, Any] = {"num_frames": num_frames, "width": 112, "height": 112}
    path.write_bytes(encode("mp4", "libx264", fps=8, paint=_square, **size))
    return path


def jpeg_frame(number: int) -> bytes:
    """Frame ``number`` of a square that moves to the right, as JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(_square(number, 112, 112)).save(buffer, "JPEG")
    return buffer.getvalue()


def data_url(data: bytes | Path, media_type: str = "video/mp4") -> str:
    """Bytes or a file as data: URL."""
    raw = data.read_bytes() if isinstance(data, Path) else data
    return f"data:{media_type};base64,{base64.b64encode(raw).decode()}"


def video_message(url: str, text: str = "Describe the video.") -> dict[str, Any]:
    """A user turn with a video before the text."""
    return {
        "role": "user",
        "content": [
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "text", "text": text},
        ],
    }


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serves a folder over http on the loopback interface."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
