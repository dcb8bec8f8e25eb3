"""Gateway and services by mutual TLS, as real processes."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.support import CHAT, chat_body, free_port, process, readiness, wait_until


def test_a_gateway_asks_its_services_by_mutual_tls(pki: Path, pair: dict[str, str]) -> None:
    """Who else is let in: tests/integration/services/test_service_lifecycle.py."""
    target, draft, gateway = (str(free_port()) for _ in range(3))
    ca, cert, key = (str(pki / name) for name in ("ca.pem", "service.pem", "service.key"))
    tls = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", ca)
    small = ("--slots", "1", "--max-context-length", "256", "--num-threads", "1")
    options = ("--served-name", "hippo", *tls, *small)
    by_tls = (
        *("--services-tls", "--services-tls-ca", ca),
        *("--services-tls-cert", cert, "--services-tls-key", key),
    )
    services = ("--target", f"127.0.0.1:{target}", "--draft", f"127.0.0.1:{draft}")
    url = f"http://127.0.0.1:{gateway}"
    with (
        process("services.target", "--port", target, "--model", pair["target"], *options),
        process("services.draft", "--port", draft, "--model", pair["draft"], *options),
        process("gateway", "--port", gateway, *services, *by_tls),
    ):
        wait_until(lambda: (readiness(url) or {}).get("draft") == "ready")
        answer = httpx.post(url + CHAT, json=chat_body(None, 8), trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
