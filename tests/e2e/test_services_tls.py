"""Gateway and services by mutual TLS, as real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from hippo.cli.processes import Child
from tests.e2e.support import GREEDY, free_port, wait_until


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[None]:
    child = Child(module, lambda name, line: None)
    child.start(module, list(arguments))
    try:
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(20)


def _ready(port: int) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
    except httpx.HTTPError:
        return None


def _first_answer(port: int) -> httpx.Response:
    """As soon as the gateway listens."""
    while (answer := _ready(port)) is None:
        time.sleep(0.05)
    return answer


def test_who_shows_a_certificate_is_answered_and_nobody_else(
    pki: Path, target_checkpoint: Path, draft_checkpoint: Path
) -> None:
    target, draft, known, unknown, plain = (free_port() for _ in range(5))
    ca, cert, key = (str(pki / name) for name in ("ca.pem", "service.pem", "service.key"))
    service = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", ca, "--dtype", "float32")
    gateway = ("--target", f"127.0.0.1:{target}", "--draft", f"127.0.0.1:{draft}")
    by_tls = ("--services-tls", "--services-tls-ca", ca)
    certificate = ("--services-tls-cert", cert, "--services-tls-key", key)
    with ExitStack() as stack:
        for arguments in (
            ("services.target", "--port", str(target), "--model", str(target_checkpoint), *service),
            ("services.draft", "--port", str(draft), "--model", str(draft_checkpoint), *service),
            ("gateway", "--port", str(known), *gateway, *by_tls, *certificate),
            ("gateway", "--port", str(unknown), *gateway, *by_tls),
            ("gateway", "--port", str(plain), *gateway),
        ):
            stack.enter_context(_process(*arguments))

        def is_ready() -> bool:
            answer = _ready(known)
            is_up = answer is not None and answer.status_code == 200
            return is_up and answer is not None and answer.json()["draft"] == "ready"

        wait_until(is_ready)
        url = f"http://127.0.0.1:{known}"
        (card,) = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": card["id"],
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 8,
                "ignore_eos": True,
                **GREEDY,
            },
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        for port in (unknown, plain):
            assert _first_answer(port).status_code == 503
