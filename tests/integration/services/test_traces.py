"""Spans of a request, from the gateway through both services to an OTLP receiver."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hippo.base.config import SettingsError
from hippo.base.logs import _TextFormatter
from hippo.base.tracing import NO_SPAN, current_span, span, start_tracing, stop_tracing
from hippo.rpc.client import DRAFT_METHOD, VERIFY_METHOD
from tests.support.models.toy_model import ToyModel
from tests.support.running.gateways import CHAT as CHAT_PATH
from tests.support.running.gateways import serving_toys, toy_chat
from tests.support.running.services import until
from tests.support.watching.otlp import ReceivedSpan, Receiver, otlp_receiver

ROOT = Path(__file__).resolve().parents[3]
CHAT = f"POST {CHAT_PATH}"
SERVER, CLIENT = 2, 3
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Takes the spans of this process, which is gateway, draft and target at once."""
    with otlp_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        start_tracing("test")
        try:
            yield receiver
        finally:
            stop_tracing()


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway before a toy pair."""

    http: httpx.AsyncClient
    receiver: Receiver

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT_PATH, json=toy_chat(**fields), headers=headers)

    async def trace(self) -> dict[str, list[ReceivedSpan]]:
        """The spans of the newest trace, by name, once all of them have ended."""
        spans: dict[str, list[ReceivedSpan]] = {}

        def is_complete() -> bool:
            spans.clear()
            roots = [one for one in self.receiver.spans if one.name == CHAT]
            for one in self.receiver.of_trace(roots[-1].trace_id) if roots else []:
                spans.setdefault(one.name, []).append(one)
            methods = [spans.get(each, []) for each in (VERIFY_METHOD, DRAFT_METHOD)]
            kinds = [one.kind for each in methods for one in each]
            return bool(roots) and kinds.count(CLIENT) == kinds.count(SERVER)

        await until(is_complete)
        return spans


def slow_model() -> ToyModel:
    """A target that leaves the draft time."""
    model = ToyModel()
    model.on_forward = lambda plan: time.sleep(0.01)
    return model


def fail_once(model: ToyModel) -> None:
    def fail(_: Any) -> None:
        model.on_forward = lambda plan: None
        raise RuntimeError("a bug")

    model.on_forward = fail


@asynccontextmanager
async def serving(
    receiver: Receiver, *, target: ToyModel | None = None, draft: ToyModel | None = None
) -> AsyncIterator[Served]:
    async with serving_toys(target, draft) as http:
        receiver.spans.clear()
        yield Served(http, receiver)


async def test_a_request_is_one_trace_through_gateway_draft_and_target(receiver: Receiver) -> None:
    async with serving(receiver, target=slow_model()) as served:
        answer = (await served.ask(headers=SAMPLED)).raise_for_status().json()
        spans = await served.trace()
        metrics = await served.http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    [chat] = spans[CHAT]
    assert (chat.trace_id, chat.parent_id) == (TRACE_ID, CALLER_ID)
    assert chat.kind == SERVER and not chat.is_error
    assert (chat.service, chat.host) == ("hippo-test", socket.gethostname())
    said, facts = chat.attributes, answer["hippo"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.response.finish_reasons": ["length"],
        "hippo.policy": "serial",
        "hippo.acceptance_rate": pytest.approx(facts["acceptance_rate"], abs=1e-4),
        "hippo.mean_tokens_per_forward": pytest.approx(facts["mean_tokens_per_forward"], abs=1e-4),
        "http.route": CHAT_PATH,
        "http.response.status_code": 200,
    }
    assert {name: said[name] for name in expected} == expected

    assert {one.parent_id for one in spans["read_media"]} == {chat.span_id}
    for method in (VERIFY_METHOD, DRAFT_METHOD):
        call, handled = sorted(spans[method], key=lambda one: -one.kind)
        assert (call.kind, handled.kind) == (CLIENT, SERVER)
        assert call.parent_id == chat.span_id and handled.parent_id == call.span_id
        assert handled.attributes["hippo.request_id"] == said["hippo.request_id"]
        assert handled.attributes["hippo.num_visual_tokens"] == 16
        stages = {
            one.name: one
            for each in spans.values()
            for one in each
            if one.parent_id == handled.span_id
        }
        assert set(stages) >= {
            "decode_media", "prepare_prompt", "vision_tower", "prefill", "decode",
        }  # fmt: skip
        tower, prefill, decode = (stages[name] for name in ("vision_tower", "prefill", "decode"))
        assert handled.began_ns <= tower.began_ns <= tower.ended_ns <= prefill.began_ns
        assert prefill.began_ns < prefill.ended_ns == decode.began_ns < decode.ended_ns
        assert decode.ended_ns <= handled.ended_ns
        if method == VERIFY_METHOD:
            assert handled.events["selection"]["hippo.num_visual_tokens"] == 16
            assert decode.attributes["hippo.num_forwards"] == facts["num_forwards"]
            assert decode.attributes["hippo.num_tokens"] == 39
        else:
            assert decode.attributes["hippo.num_blocks"] >= facts["num_blocks"]
    [exemplar] = [
        line
        for line in metrics.text.splitlines()
        if line.startswith("vllm:time_to_first_token_seconds_bucket") and "# {" in line
    ]
    assert f'# {{trace_id="{TRACE_ID}"}}' in exemplar
    assert metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert not any(one.name.endswith(("/metrics", "/ready")) for one in receiver.spans)


async def test_a_request_without_a_caller_begins_a_trace_and_an_unsampled_one_leaves_none(
    receiver: Receiver,
) -> None:
    async with serving(receiver) as served:
        unsampled = {"traceparent": f"00-{'1' * 32}-{CALLER_ID}-00"}
        assert (await served.ask(headers=unsampled)).status_code == 200
        assert (await served.http.request("MADEUP", "/v1/models")).status_code == 405
        assert (await served.ask()).status_code == 200
        spans = await served.trace()
        assert any(one.name.startswith("_OTHER ") for one in served.receiver.spans)
        assert not any("MADEUP" in str(one) for one in served.receiver.spans)
        assert spans[CHAT][0].parent_id == "" and len(spans[DRAFT_METHOD]) == 2
        assert not served.receiver.of_trace("1" * 32)


async def test_an_error_of_the_media_is_on_the_target_and_no_failure_of_the_gateway(
    receiver: Receiver,
) -> None:
    async with serving(receiver) as served:
        assert (await served.ask(video=b"no video")).status_code == 400
        spans = await served.trace()
    [chat] = spans[CHAT]
    assert chat.attributes["error.type"] == "MediaError" and not chat.is_error
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert {one.attributes["error.type"] for one in spans["decode_media"]} == {"MediaError"}


async def test_a_failure_of_the_target_is_an_error_all_the_way_up(receiver: Receiver) -> None:
    target = ToyModel()
    async with serving(receiver, target=target) as served:
        fail_once(target)
        assert (await served.ask()).status_code == 500
        spans = await served.trace()
    assert spans[CHAT][0].is_error
    assert [one.is_error for one in spans[VERIFY_METHOD]] == [True, True]
    assert not any(one.is_error for one in spans[DRAFT_METHOD])


async def test_a_client_that_leaves_ends_all_spans_as_cancelled(receiver: Receiver) -> None:
    async with serving(receiver, target=slow_model()) as served:
        body = toy_chat(stream=True, max_tokens=400)
        async with served.http.stream("POST", CHAT_PATH, json=body) as response:
            await anext(response.aiter_lines())
        spans = await served.trace()
    [chat] = spans[CHAT]
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert not chat.is_error
    assert {one.attributes["hippo.outcome"] for one in spans[VERIFY_METHOD]} == {"cancelled"}


async def test_a_lost_draft_is_an_event_of_the_request_and_an_error_of_its_stream(
    receiver: Receiver,
) -> None:
    draft = ToyModel(noise=0.3)
    async with serving(receiver, target=slow_model(), draft=draft) as served:
        fail_once(draft)
        answer = (await served.ask()).raise_for_status().json()
        spans = await served.trace()
    [chat] = spans[CHAT]
    assert answer["usage"]["completion_tokens"] == 40 and not chat.is_error
    assert chat.events["draft lost"]["hippo.cause"] == "error"
    assert chat.attributes["hippo.num_draft_losses"] == 1
    assert any(one.is_error for one in spans[DRAFT_METHOD])
    assert not any(one.is_error for one in spans[VERIFY_METHOD])


async def test_the_text_of_an_unexpected_error_is_in_no_span(receiver: Receiver) -> None:
    def found() -> list[ReceivedSpan]:
        return [one for one in receiver.spans if one.name == "unforeseen"]

    with pytest.raises(KeyError), span("unforeseen"):
        raise KeyError("what the user asked")
    await until(lambda: bool(found()))
    [failed] = found()
    assert failed.is_error and failed.attributes["error.type"] == "KeyError"
    assert failed.problem == ""


def test_a_log_line_has_the_id_of_the_trace(receiver: Receiver) -> None:
    line = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})
    with span("request") as own:
        assert f"trace_id={own.trace_id}" in _TextFormatter("gateway").format(line)
    assert "trace_id" not in _TextFormatter("gateway").format(line)


def test_without_an_endpoint_nothing_is_imported() -> None:
    program = (
        "import os, sys\n"
        "from hippo.base.tracing import current_span, span, start_tracing\n"
        "start_tracing('gateway', {})\n"
        "with span('request') as own:\n"
        "    assert not own.is_recording and own.headers == () and current_span() is own\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
        "endpoint = {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:1'}\n"
        "os.environ['OTEL_PROPAGATORS'] = 'tracecontext,b3'\n"
        "try:\n"
        "    start_tracing('gateway', endpoint)\n"
        "except Exception as error:\n"
        "    print(repr(error))\n"
        "sys.modules['opentelemetry'] = None\n"
        "start_tracing('gateway', endpoint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "SettingsError('OTEL_PROPAGATORS: Propagator b3 not found" in done.stdout
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry" in done.stderr
    assert "pip install 'hippo-serve[traces]'" in done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "expected a URL"),
        (
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            "expected http/protobuf",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
                "OTEL_BSP_MAX_QUEUE_SIZE": "8",
            },
            "OTEL_BSP_.*: max_export_batch_size must be",
        ),
    ],
)
def test_a_variable_that_cannot_work_is_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # some are read by OpenTelemetry
    with pytest.raises(SettingsError, match=words):
        start_tracing("gateway", variables)


@pytest.mark.parametrize(
    "switch", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_opentelemetrys_switches_turn_traces_off(switch: dict[str, str]) -> None:
    start_tracing("gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector", **switch})
    assert current_span() is NO_SPAN
