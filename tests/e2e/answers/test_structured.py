"""Structured output, asked for by the official client of real processes."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.support import CHAT, GREEDY, SAMPLED, ask, data_url, video_message


def _object(**properties: Any) -> dict[str, Any]:
    named = {"properties": properties, "required": [*properties]}
    return {"type": "object", **named, "additionalProperties": False}


THING = _object(color={"enum": ["red", "green", "blue"]}, shape={"type": "string", "maxLength": 12})
SCHEMA = _object(
    objects={"type": "array", "items": THING, "minItems": 1, "maxItems": 2},
    count={"type": "integer", "minimum": 0, "maximum": 9},
)
FORMAT = {"type": "json_schema", "json_schema": {"name": "scene", "schema": SCHEMA}}
HELLO = {"model": "hippo", "messages": [{"role": "user", "content": "Hello"}]}
PENALISED = {**SAMPLED, "frequency_penalty": 0.3, "logprobs": True, "top_logprobs": 2}


def _answer(client: openai.OpenAI, clip: Path, policy: str = "adaptive", **fields: Any) -> Any:
    extra = {"speculative": {"policy": policy}, **fields.pop("extra_body", {})}
    return ask(client, data_url(clip), extra_body=extra, **({"max_tokens": 160} | fields))


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalties"])
def test_every_policy_gives_the_targets_own_answer_by_the_schema(
    client: openai.OpenAI, clip: Path, sampling: dict[str, Any]
) -> None:
    fields = {"response_format": FORMAT, "extra_body": {"return_token_ids": True}, **sampling}
    alone = _answer(client, clip, "off", **fields)
    choice = alone.choices[0]
    assert choice.finish_reason == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
    policies = ("serial", "vpsd", "optimistic", "conservative", "adaptive")
    for policy in policies if sampling is GREEDY else policies[1:3]:
        pair = _answer(client, clip, policy, **fields)
        other = pair.choices[0]
        assert other.model_extra["token_ids"] == choice.model_extra["token_ids"], policy
        assert other.message.content == choice.message.content, policy
        figures = pair.model_extra["hippo"]
        assert figures["draft_problem"] is None and figures["num_draft_streams"] == 1, policy
        assert figures["draft_used"] or policy == "adaptive"
        if other.logprobs:
            tokens = [one.token for one in other.logprobs.content]
            assert "".join(tokens) == other.message.content


@pytest.mark.parametrize(
    "text", ["a" + "🎈" * 20, "བོད་སྐད་ཡིག་" * 2, "ที่👩‍🚀" * 4], ids=["emoji", "tibetan", "thai"]
)
def test_letters_of_several_tokens_are_whole_by_every_policy(
    client: openai.OpenAI, clip: Path, text: str
) -> None:
    """Verdicts that end within a letter do not show in answers, streams, events or tokens."""
    for policy, has_logprobs in (("off", True), ("vpsd", False), ("adaptive", False)):
        extra = {"structured_outputs": {"choice": [text]}, "return_events": True}
        fields: dict[str, Any] = {"logprobs": has_logprobs, "max_tokens": 400, **GREEDY}
        chunks = list(_answer(client, clip, policy, stream=True, extra_body=extra, **fields))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == text, policy
        events = [event for choice in choices for event in choice.model_extra.get("events", [])]
        tokens = [token for event in events for token in event.get("tokens", [])]
        assert "".join(token["text"] for token in tokens) == text
        told = [choice.logprobs for choice in choices if choice.logprobs]
        entries = [entry for logprobs in told for entry in logprobs.content]
        data = bytes(byte for entry in entries for byte in entry.bytes)
        assert data.decode() == (text if has_logprobs else "")


class Thing(BaseModel):
    color: Literal["red", "green", "blue"]
    is_round: bool


class Scene(BaseModel):
    mood: Literal["calm", "lively"]
    largest: Thing


def test_the_official_client_parses_an_answer_into_its_class(
    client: openai.OpenAI, clip: Path
) -> None:
    messages: Any = [video_message(data_url(clip))]
    fields: dict[str, Any] = {"messages": messages, **SAMPLED, "max_tokens": 200}
    parsed = client.chat.completions.parse(model="hippo", response_format=Scene, **fields)
    scene = parsed.choices[0].message.parsed
    assert isinstance(scene, Scene) and isinstance(scene.largest, Thing)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no", "not sure"]}, "yes|no|not sure"),
        ({"structured_outputs": {"choice": ['"a"', "b c"]}}, '"a"|b c'),
        ({"guided_regex": r"[A-Z][a-z]{3,6} \d{2}\."}, r"[A-Z][a-z]{3,6} \d{2}\."),
        ({"structured_outputs": {"regex": "(ab|cd){2}"}}, "(ab|cd){2}"),
        ({"guided_json": {"enum": [1, "one"]}}, '1|"one"'),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
        ({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*"),
        ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    ],
)
def test_vllms_forms_constrain_the_whole_answer(
    client: openai.OpenAI, clip: Path, fields: dict[str, Any], pattern: str
) -> None:
    choice = _answer(client, clip, extra_body=fields, max_tokens=48, **SAMPLED).choices[0]
    assert re.fullmatch(pattern, choice.message.content)
    assert choice.finish_reason == "stop" or "json_object" in str(fields)


def test_limits_and_stops_end_an_answer_before_its_form_is_complete(
    client: openai.OpenAI, clip: Path
) -> None:
    short = _answer(client, clip, response_format=FORMAT, max_tokens=5, **SAMPLED).choices[0]
    assert short.finish_reason == "length" and short.message.content.startswith('{"obj')
    cut = _answer(client, clip, response_format=FORMAT, stop=["color"], **SAMPLED).choices[0]
    assert cut.finish_reason == "stop" and re.fullmatch('{"objects": ?\\[{"', cut.message.content)
    extra = {"guided_choice": ["a", "b"], "min_tokens": 20}
    assert _answer(client, clip, extra_body=extra).usage.completion_tokens == 2


def _by_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "the field json_schema"),
        (_by_schema(), "response_format.json_schema.schema", "is required"),
        (_by_schema(schema={"type": "int"}), "response_format.json_schema.schema", "type: int"),
        ({"guided_json": {"not": {}}}, "guided_json", 'Unimplemented keys: ["not"]'),
        ({"guided_json": "{"}, "guided_json", "cannot be used"),
        ({"guided_json": "1}, {"}, "guided_json", "cannot be used"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "it cannot begin"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a" * 2**19}, "guided_regex", "at most 32,768 are allowed"),
        ({"guided_choice": []}, "guided_choice", "at least 1 must be there"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "both constrain"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "together with guided_choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "a JSON schema"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(CHAT, json=HELLO | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_a_form_that_becomes_too_complex_in_an_answer_is_the_clients_error(
    http: httpx.Client,
) -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(900)}
    inner = _object(**properties) | {"required": []}
    schema = {"type": "array", "minItems": 2, "prefixItems": [{"const": "a"}], "items": inner}
    response = http.post(CHAT, json=HELLO | {"guided_json": schema, "stream": True})
    *_, before, last = filter(None, response.text.split("\n\n"))
    assert "choices" in before
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_json"), error
    assert "guided_json cannot go on after" in error["message"]
    assert "Current row has" in error["message"]
