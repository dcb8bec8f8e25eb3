"""What a request says of thoughts, and what of it the chat template is given."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.answer.plan import SpeculationPlan
from gateway.api.schemas import Message
from gateway.api.translate import open_request
from gateway.common.config import GatewaySettings
from hippo.errors import InvalidRequestError
from hippo.types import OpenRequest, Pruning
from tests.support.running.gateways import chat_request
from tests.support.running.info import small_model_info

PLAN = SpeculationPlan("off", 1, 1, Pruning())
QWEN = ("add_vision_id", "enable_thinking")
EFFORTS = ("enable_thinking", "preserve_thinking", "reasoning_effort")


def _open(names: tuple[str, ...], **fields: Any) -> OpenRequest:
    info = replace(small_model_info(), template_names=names)
    return open_request(
        chat_request(**fields),
        request_id="r",
        plan=PLAN,
        info=info,
        settings=GatewaySettings(target=("localhost:1",)),
    )


@pytest.mark.parametrize(
    ("names", "fields", "expected"),
    [
        ((), {}, {}),
        ((), {"chat_template_kwargs": {}}, {}),
        ((), {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ((), {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN, {"chat_template_kwargs": {"add_vision_id": True, "other": None}},
         {"add_vision_id": True}),
        (EFFORTS, {"reasoning_effort": "low"},
         {"reasoning_effort": "low", "enable_thinking": True}),
        (EFFORTS, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (EFFORTS, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
         {"reasoning_effort": "x", "enable_thinking": True}),
    ],
)  # fmt: skip
def test_the_template_is_given_what_it_knows(
    names: tuple[str, ...], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert json.loads(_open(names, **fields).template_values or "{}") == expected


@pytest.mark.parametrize(
    ("names", "fields", "param", "why"),
    [
        ((), {"chat_template_kwargs": {"x": True}},
         "chat_template_kwargs.x", "its names are: none"),
        (QWEN, {"chat_template_kwargs": {"enable_thinking": "false"}},
         "chat_template_kwargs.enable_thinking", "must be true or false"),
        (QWEN, {"chat_template_kwargs": {"thinking": False}},
         "chat_template_kwargs.thinking", "its names are: add_vision_id, enable_thinking"),
        (QWEN, {"reasoning_effort": "high"}, "reasoning_effort", "knows no efforts"),
    ],
)  # fmt: skip
def test_what_the_template_does_not_know_is_refused_with_what_it_knows(
    names: tuple[str, ...], fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        _open(names, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("value", ["<|im_end|>", "[INST]", "x" * 65, [1], {"a": 1}])
def test_a_value_is_no_text_that_could_hold_a_control_token(value: object) -> None:
    with pytest.raises(ValidationError, match="neither true, false, a number nor a word"):
        chat_request(chat_template_kwargs={"enable_thinking": value})


def test_earlier_thoughts_go_to_a_template_that_keeps_them_and_later_ones_to_any() -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": None, "reasoning_content": "Well"},
    ]
    left_out = {"chat_template_kwargs": {"preserve_thinking": False}}
    for names, fields, thoughts in (
        (QWEN, {}, ["", "", "", "Well"]),
        (EFFORTS, {}, ["", "Hm.", "", "Well"]),
        (EFFORTS, left_out, ["", "", "", "Well"]),
    ):
        opened = _open(names, messages=turns, **fields)
        assert [message.thought for message in opened.messages] == thoughts


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "reasoning": "a"}, "of messages with the role assistant"),
        ({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, "differ"),
    ],
)
def test_a_thought_that_is_none_is_refused(message: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Message.model_validate({"content": "Hi", **message})
