"""Settings and request values are held to what they may be, and errors say what would be right."""

import math
from typing import Any

import pytest

from gateway.common.config import GatewaySettings
from hippo.base.config import SettingsError, load_settings
from hippo.base.validation import validate_sampling
from hippo.errors import InvalidRequestError
from hippo.types import SamplingParams
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


def test_the_defaults_and_the_ends_of_every_range_are_accepted() -> None:
    validate_sampling(SamplingParams(), num_token_ids=10)
    validate_sampling(
        SamplingParams(
            temperature=2.0,
            top_k=2**31 - 1,
            top_p=1e-9,
            min_p=1.0,
            repetition_penalty=10.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, 100.0), (9, -100.0)),
            seed=2**64 - 1,
            choice_index=2**32 - 1,
        ),
        num_token_ids=10,
    )


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("temperature", -0.1, "0 to 2"),
        ("temperature", 2.1, "0 to 2"),
        ("temperature", math.nan, "0 to 2"),
        ("temperature", math.inf, "0 to 2"),
        ("temperature", "hot", "0 to 2"),
        ("temperature", True, "0 to 2"),
        ("top_k", -1, "a whole number from 0"),
        ("top_k", 2.5, "a whole number from 0"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.01, "greater than 0 and at most 1"),
        ("top_p", math.nan, "greater than 0 and at most 1"),
        ("min_p", -0.01, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 1e-40, "must be 0.01 to 10"),
        ("repetition_penalty", 1e9, "must be 0.01 to 10"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
        ("seed", -1, "a whole number from 0"),
        ("seed", 2**64, "a whole number from 0"),
        ("choice_index", -1, "a whole number from 0"),
        ("logit_bias", ((3, 101.0),), "-100 to 100"),
        ("logit_bias", ((3, math.nan),), "-100 to 100"),
        ("logit_bias", ((10, 1.0),), "0 to 9"),
        ("logit_bias", ((-1, 1.0),), "0 to 9"),
        ("logit_bias", ((1.5, 1.0),), "whole numbers"),
        ("logit_bias", ((3, 1.0), (3, 1.0)), "twice"),
        ("logit_bias", tuple((i, 1.0) for i in range(1025)), "at most 1024"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_field_and_the_legal_range(
    field: str, value: Any, legal: str
) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError, match=f"{field}.*{legal}") as caught:
        validate_sampling(params, num_token_ids=10)
    assert caught.value.param == field
