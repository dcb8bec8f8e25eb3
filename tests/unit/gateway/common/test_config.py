"""Settings of the gateway that would fail only later."""

import pytest

from gateway.common.config import GatewaySettings
from hippo.base.config import SettingsError


@pytest.mark.parametrize(
    "name",
    [
        "media.example:8000",
        "https://media.example",
        "\N{SNOWMAN}.net",
        ".media.example",
        "*..media.example",
    ],
)
def test_a_domain_of_media_is_a_hosts_name(name: str) -> None:
    with pytest.raises(SettingsError, match="--allowed-media-domains: expected names such as"):
        GatewaySettings(target=("t:1",), draft=("d:1",), allowed_media_domains=(name,))


@pytest.mark.parametrize("name", ["*.Müller.example", "127.0.0.1", "media.example."])
def test_a_domain_may_have_other_letters_or_be_an_address(name: str) -> None:
    GatewaySettings(target=("t:1",), draft=("d:1",), allowed_media_domains=(name,))
