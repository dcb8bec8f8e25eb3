"""What pages of other sites may do."""

import asyncio
from typing import Any

import pytest

from gateway.app import create_app
from gateway.common.config import GatewaySettings
from tests.support.running.gateways import client_of

KEYS = ("alice=0123456789abcdef",)


async def _status(headers: dict[str, str], *, method: str = "GET", **settings: Any) -> int:
    app = create_app(GatewaySettings(target=("127.0.0.1:1",), **settings), asyncio.Event())
    async with client_of(app.__call__) as http:  # without starting to watch services
        path = "/health" if method == "GET" else "/v1/nothing"
        return (await http.request(method, path, headers=headers)).status_code


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "gateway:8000",
        "hippo.localhost:8000", "localhost.:8000",
    ],
)  # fmt: skip
async def test_a_host_that_no_site_can_own_is_ours(host: str) -> None:
    assert await _status({"host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"]
)
async def test_a_name_of_another_site_is_not(host: str) -> None:
    assert await _status({"host": host}) == 403
    assert await _status({"host": host}, allowed_hosts=("hippo.example",)) == 403
    assert await _status({"host": host}, allowed_hosts=("*",)) == 200
    assert await _status({"host": host}, api_keys=KEYS) == 200  # the page has no key


async def test_the_operator_names_the_servers_hosts() -> None:
    allowed = ("hippo.example", "*.apps.example")
    for host in ("hippo.example:80", "HIPPO.example", "a.apps.example", "b.a.apps.example"):
        assert await _status({"host": host}, allowed_hosts=allowed) == 200
    for host in ("apps.example", "evilapps.example", "a.hippo.example"):
        assert await _status({"host": host}, allowed_hosts=allowed) == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:9", "null"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_page_of_another_site_changes_nothing(origin: str, method: str) -> None:
    headers = {"origin": origin}
    assert await _status(headers, method=method) == 403
    assert await _status(headers, method=method, api_keys=KEYS) == 403
    assert await _status(headers, method=method, cors_origins=("https://evil.example",)) == (
        404 if "evil" in origin else 403
    )
    assert await _status(headers, method=method, cors_origins=("*",)) == 404


async def test_our_own_page_and_programs_may() -> None:
    assert await _status({"origin": "http://localhost:8000"}, method="POST") == 404
    assert await _status({}, method="POST") == 404
    behind_proxy = {"origin": "https://hippo.example", "sec-fetch-site": "same-origin"}
    assert await _status(behind_proxy, method="POST") == 404
    assert await _status({**behind_proxy, "sec-fetch-site": "same-site"}, method="POST") == 403


async def test_another_site_embeds_nothing_but_may_link() -> None:
    site = {"sec-fetch-site": "cross-site"}
    assert await _status({**site, "sec-fetch-mode": "no-cors"}) == 403
    assert await _status({**site, "sec-fetch-mode": "navigate"}) == 200
