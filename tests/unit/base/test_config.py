"""Settings are held to what they declare, and say what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.common.config import GatewaySettings
from hippo.base.config import SettingsError, load_settings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

GATEWAY = (GatewaySettings, ("--target", "127.0.0.1:1"))
TARGET = (TargetSettings, ("--model", "m"))
DRAFT = (DraftSettings, ("--model", "m"))


@pytest.mark.parametrize(
    ("process", "given", "said"),
    [
        (GATEWAY, "--port 70000", "--port is 70000; it must be 0 to 65535"),
        (GATEWAY, "--gamma 0", "--gamma is 0; it must be at least 1"),
        (GATEWAY, "--default-top-p 0", "--default-top-p is 0.0; it must be above 0 and at most 1"),
        (GATEWAY, "--default-temperature 2.1", "--default-temperature is 2.1; it must be 0 to 2"),
        (GATEWAY, "--calibration-share nan", "--calibration-share is nan; it must be 0 to 1"),
        (GATEWAY, "--upload-ttl-s 0", "--upload-ttl-s is 0.0; it must be above 0"),
        (GATEWAY, "--policy fast", "--policy='fast': expected one of adaptive, "),
        (GATEWAY, "--page maybe", "--page='maybe': expected true or false"),
        (GATEWAY, "--target somewhere", "--target: expected host:port, not 'somewhere'"),
        (TARGET, "--slots 0", "--slots is 0; it must be at least 1"),
        (TARGET, "--slots many", "--slots='many': expected a whole number, or auto"),
        (TARGET, "--max-frames 1", "--max-frames is 1; it must be at least 2"),
        (TARGET, "--decode-seconds 0", "--decode-seconds is 0.0; it must be above 0"),
        (TARGET, "--tls-ca ca.pem", "needs both --tls-cert and --tls-key"),
        (DRAFT, "--decode-mib 63", "--decode-mib is 63; it must be at least 64"),
        (DRAFT, "--max-guessed -1", "--max-guessed is -1; it must be at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(
    process: tuple[type[Any], tuple[str, ...]], given: str, said: str
) -> None:
    kind, needed = process
    with pytest.raises(SettingsError) as caught:
        load_settings(
            kind, (*needed, *given.split()), {}, env_prefix="HIPPO", prog="p", description=""
        )
    assert said in caught.value.message


def test_a_missing_setting_is_named_by_its_flag_and_variable() -> None:
    with pytest.raises(SettingsError, match=r"^--target \(or HIPPO_TARGET\) is required: host"):
        load_settings(GatewaySettings, (), {}, env_prefix="HIPPO", prog="p", description="")


@pytest.mark.parametrize("given", ["auto", ""])
def test_auto_leaves_a_number_to_the_process(given: str) -> None:
    env = {"P_MODEL": "m"} | ({"P_SLOTS": given, "P_MAX_CONTEXT_LENGTH": given} if given else {})
    found = load_settings(TargetSettings, (), env, env_prefix="P", prog="p", description="")
    assert (found.slots, found.load_plan.num_slots, found.max_context_length) == (None,) * 3
