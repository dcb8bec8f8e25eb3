"""One stack of real processes for all end-to-end tests, started as `hippo up` does."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from hippo.cli.stack import BUNDLED_PAIR, StackOptions
from tests.e2e.support import Running, official_client, plain_client, write_clip
from tests.support.running.stack import run_stack
from tests.support.running.zygote import Zygote

MAX_CONTEXT_LENGTH = 4096


@pytest.fixture(scope="session")
def pair() -> dict[str, str]:
    """The bundled pair."""
    return {role: str(BUNDLED_PAIR / role) for role in ("target", "draft")}


# The tests beside these start processes of their own.
@pytest.fixture(scope="package", autouse=True)
def forks(start_zygote: Callable[[], Zygote]) -> Iterator[None]:
    """All services that a test starts are forks of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hippo.cli.processes.start_module",
            lambda module, arguments: start_zygote().start(module, arguments),
        )
        yield


@pytest.fixture(scope="package")
def running(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Draft, target and gateway, ready."""
    media_folder = tmp_path_factory.mktemp("media")
    clip = write_clip(media_folder / "clip.mp4")
    length = ("--max-context-length", str(MAX_CONTEXT_LENGTH))
    limits = ("--slots", "2", *length, "--num-threads", "1")
    options = StackOptions(
        target_model=pair["target"],
        draft_model=pair["draft"],
        dtype="float32",  # in which equality is exact
        port=0,
        allowed_local_media_path=str(media_folder),
        target_args=(*limits, "--max-queue", "2"),
        draft_args=limits,
        gateway_args=(
            "--calibration-share", "0",  # every answer is sped up
            "--services-silence-s", "120",  # tests hold a service still for longer than 20 s
            "--allowed-media-domains", "127.0.0.1",
            "--allow-http-media", "true",
            "--allow-private-media-addresses", "true",
            "--max-media-bytes", str(1 << 20),
            "--max-body-bytes", str(4 << 20),
        ),
    )  # fmt: skip
    with run_stack(options) as started:
        stack, lines = started.stack, started.lines
        places = (media_folder, clip, MAX_CONTEXT_LENGTH)
        yield Running(stack, started.metrics_ports, lines, *places)
        stack.check_running()
    tracebacks = [
        at for at, line in enumerate(lines) if "Traceback" in line or "never awaited" in line
    ]
    assert not tracebacks, "\n".join(lines[max(0, tracebacks[0] - 10) : tracebacks[0] + 60])


@pytest.fixture
def mended(running: Running) -> Iterator[None]:
    """Whatever a test did to the processes is mended after it."""
    yield
    for name in ("draft", "target", "gateway"):
        running.stack.child(name).send_signal(signal.SIGCONT)
        if not running.stack.child(name).is_running:
            running.stack.start_service(name)
    running.stack.wait_ready(timeout_s=60)


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    """The official client."""
    with official_client(running.url) as client:
        yield client


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    """A plain client, for what the official one cannot say wrongly."""
    with plain_client(running.url) as client:
        yield client


@pytest.fixture
def clip(running: Running) -> Path:
    """A small video under the allowed directory."""
    return running.clip
