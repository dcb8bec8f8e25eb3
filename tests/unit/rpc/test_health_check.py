"""The probe of containers, against real servers."""

import asyncio
import subprocess
import sys

import pytest

from hippo.rpc import health_check
from hippo.rpc.client import TARGET_SERVICE, TargetClient
from hippo.rpc.server import RpcServer
from tests.support.running.plain_server import PlainServer, serving


def _probe(*arguments: str) -> int:
    return health_check.main([*arguments, "--timeout", "10"])


async def test_a_service_is_healthy_while_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer("toy.Service")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        assert await asyncio.to_thread(_probe, address) == 1
        assert "NOT_SERVING" in capsys.readouterr().err
        await server.set_serving(True)
        assert await asyncio.to_thread(_probe, address) == 0
        assert await asyncio.to_thread(_probe, address, "--service", "toy.Service") == 0
        assert await asyncio.to_thread(_probe, address, "--service", "other") == 1
        assert "NOT_FOUND" in capsys.readouterr().err
    finally:
        await server.stop()
    assert await asyncio.to_thread(_probe, address) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = RpcServer(TARGET_SERVICE)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    client = TargetClient(address)
    await server.set_serving(True)
    try:
        assert await client.health_problem() is None
        assert await asyncio.to_thread(_probe, address) == 0
    finally:
        await client.close()
        await server.stop()


def test_a_missing_tls_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _probe("127.0.0.1:1", "--tls-ca", "/nowhere/ca.pem") == 1
    assert "/nowhere/ca.pem" in capsys.readouterr().err


def test_a_web_server_is_healthy_when_it_answers_with_200(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(PlainServer()) as plain:
        assert _probe(f"{plain.url}/v1/models") == 0
        assert _probe(f"{plain.url}/ready") == 1
        assert "HTTP status 404" in capsys.readouterr().err
    assert _probe("http://127.0.0.1:1/ready") == 1
    assert "refused" in capsys.readouterr().err


def test_the_probe_of_the_gateway_needs_no_grpc() -> None:
    program = "import sys; sys.modules['grpc'] = None\nfrom hippo.rpc.health_check import main\n"
    with serving(PlainServer()) as plain:
        program += f"sys.exit(main(['{plain.url}/v1/models']))"
        assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
