"""The description of the interface, held against a running gateway by generated requests."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.api.responses import ChatCompletion, ChatCompletionChunk
from gateway.app import create_app
from gateway.common.config import GatewaySettings
from tests.e2e.support import CHAT, Running, chat_body, chunks_of, data_url

Operation: TypeAlias = APIOperation[Any, Any, Any, Any]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
OPERATIONS = [
    "POST /v1/chat/completions",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/videos",
    "GET /v1/videos/{video_id}",
    "DELETE /v1/videos/{video_id}",
    "GET /v1/samples",
    "GET /v1/samples/{name}",
    "GET /v1/frames",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
]


@pytest.fixture(scope="module")
def schema(running: Running) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").raise_for_status().json()
    return found


def test_every_route_is_tested_here(schema: BaseSchema) -> None:
    assert sorted(_operations(schema)) == sorted(OPERATIONS)


def _operations(schema: BaseSchema) -> dict[str, Operation]:
    found = [result for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {operation.ok().label: operation.ok() for operation in found}


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        # Without a body nothing can be malformed: a path parameter is any text.
        *((label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST ")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.value,
)
def test_generated_requests_are_answered_as_described(
    schema: BaseSchema, label: str, mode: GenerationMode
) -> None:
    operation = _operations(schema)[label]
    most = 30 if operation.body else 10 if operation.path_parameters else 1

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # A model that is there, and few tokens: an answer is not what is tested here.
            case.body |= {"model": "hippo"} if "model" in case.body else {}
            if label == OPERATIONS[0]:
                case.body |= {"max_tokens": 2, "max_completion_tokens": 2}
        # A form knows no types: whatever its file is, it is bytes.
        is_wrong = mode is GenerationMode.NEGATIVE and case.media_type == "application/json"
        checks = [*CHECKS, *([negative_data_rejection] if is_wrong else [])]
        case.call_and_validate(checks=checks, timeout=60)

    ask()


def test_what_the_description_refers_to_is_there_and_nothing_else(document: dict[str, Any]) -> None:
    named = re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))
    assert set(named) == {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }
    statuses = {
        status
        for operations in document["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    assert "422" not in statuses
    assert {"200", "400", "404", "413", "429", "503", "504"} <= statuses


def test_keys_are_described_where_they_are_asked_for(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    settings = GatewaySettings(target=("localhost:1",), api_keys=("alice=sk-alice-0123456789",))
    guarded = create_app(settings, asyncio.Event()).openapi()
    for path, operations in guarded["paths"].items():
        for operation in operations.values():
            wants_key = path.startswith(("/v1/", "/tokenize", "/detokenize"))
            assert ("security" in operation) is wants_key, path
            assert ("401" in operation["responses"]) is wants_key, path


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_has_what_is_described_and_nothing_else(
    http: httpx.Client, clip: Path, n: int
) -> None:
    several = {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 1}
    options = {"return_token_ids": True, "return_timeline": True, **(several if n == 2 else {})}
    answer = (
        http.post(CHAT, json=chat_body(data_url(clip), 16, **options)).raise_for_status().json()
    )
    described = ChatCompletion.model_validate(answer, strict=True)
    assert described.model_dump(exclude_unset=True) == answer
    assert len(described.choices) == n


def test_every_event_of_a_stream_has_what_is_described_and_nothing_else(
    http: httpx.Client, clip: Path
) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    options |= {"return_token_ids": True, "return_events": True}
    options |= {"n": 2, "logprobs": True, "top_logprobs": 2}
    with http.stream("POST", CHAT, json=chat_body(data_url(clip), 16, **options)) as response:
        chunks = list(chunks_of(response))
    assert len(chunks) > 3
    for chunk in chunks:
        described = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert described.model_dump(exclude_unset=True) == chunk


def test_the_example_of_an_event_is_one(document: dict[str, Any]) -> None:
    stream = document["paths"][CHAT]["post"]["responses"]["200"]["content"]["text/event-stream"]
    event = stream["example"].split("\n\n")[0].removeprefix("data: ")
    ChatCompletionChunk.model_validate(json.loads(event), strict=True)
