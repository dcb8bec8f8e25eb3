"""Mutated bodies of chat completions: a 400 that says what is wrong, never a 500."""

from __future__ import annotations

import asyncio
import json
import tempfile
import traceback
from collections.abc import Callable

import httpx

from bench.fuzz.bodies import good_bodies, make_body
from bench.fuzz.findings import Findings
from bench.fuzz.mutate import generator
from gateway import translate
from gateway.app import create_app
from gateway.backends import Backends, Pair
from gateway.baseline import Baseline
from gateway.config import GatewaySettings
from gateway.fetch import UrlFetcher
from gateway.media import MediaReader
from gateway.metrics import GatewayMetrics
from gateway.schemas import ChatCompletionRequest
from gateway.state import GatewayState
from gateway.uploads import Uploads
from hippo.errors import HippoError, UnavailableError
from hippo.rpc import convert
from hippo.types import PROTOCOL_VERSION, ModelInfo, Pruning
from hippo.v1 import common_pb2 as pb
from tests.support.info import small_model_info

MODEL = small_model_info()
_URL = "/v1/chat/completions"
_PASSED = 503  # what the application answers to a good request: there is no target behind it


class _NoTarget(Backends):
    """Knows a model, and has nothing that serves it."""

    def model(self, name: str | None = None) -> ModelInfo:
        return MODEL

    def pair(self, name: str | None, key: bytes = b"") -> Pair:
        raise UnavailableError("the request is good; nothing serves it here")

    @property
    def has_choice(self) -> bool:
        return True


async def fuzz_chat(num_inputs: int, findings: Findings, advance: Callable[[], None]) -> None:
    """Posts ``num_inputs`` mutated bodies to the application.

    What it takes is also translated for the services and read back as they read it: of the error
    tree's errors any may come, and no other.
    """
    settings = GatewaySettings(target=("localhost:1",), max_body_bytes=1 << 20)
    patience_is_over = asyncio.Event()
    app = create_app(settings, patience_is_over)
    bodies = good_bodies()
    texts = [json.dumps(body).encode() for body in bodies]
    # Nothing listens at the only address that is allowed: all is done but the fetching itself.
    fetcher = UrlFetcher(
        allowed_domains=("127.0.0.1",), allow_http=True, allow_private_addresses=True, timeout_s=1.0
    )
    with tempfile.TemporaryDirectory() as folder:
        state = _state(settings, folder, fetcher, patience_is_over)
        app.state.gateway = state
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://fuzz") as http:
            for number in range(num_inputs):
                if number == num_inputs // 10:
                    findings.note_resources("after a tenth")
                data = make_body(generator(findings.seed, number), bodies, texts)
                findings.count(await _post(http, data, number, settings, findings))
                advance()
        findings.note_resources("at the end")
        await state.backends.close()
        await fetcher.close()


async def _post(
    http: httpx.AsyncClient,
    data: bytes,
    number: int,
    settings: GatewaySettings,
    findings: Findings,
) -> str:
    body = data[:400].decode(errors="replace")
    headers = {"content-type": "application/json"}
    try:
        response = await http.post(_URL, content=data, headers=headers)
    except Exception as error:  # a client would get status 500
        trace = traceback.format_exception(error)[-4:]
        findings.fail(number, f"it raises {error!r:.200}", body=body, trace="".join(trace))
        return "status 500"
    status = response.status_code
    if status == _PASSED:
        try:
            return f"passed, {_translated(data, settings)}"
        except Exception as error:
            findings.fail(number, f"translation raises {error!r}", body=body)
            return "passed, not translated"
    if status not in (400, 403, 404, 413):
        findings.fail(number, f"status {status}: {response.text[:200]}", body=body)
    else:
        try:
            told = response.json()["error"]
            assert set(told) == {"message", "type", "param", "code"} and told["message"]
        except Exception:
            findings.fail(number, f"status {status} without an error object", body=body)
    return f"status {status}"


def _translated(data: bytes, settings: GatewaySettings) -> str:
    """What becomes of a body that the application took, at the services' side."""
    request = ChatCompletionRequest.model_validate(json.loads(data))
    try:
        plan = translate.speculation_plan(request.speculative, settings)
        plan.make_policy()
        opening = translate.open_request(
            request,
            request_id="fuzz",
            messages=translate.chat_messages(request),
            media=(),
            sampling=translate.sampling_params(request, MODEL),
            pruning=Pruning(),
            info=MODEL,
            settings=settings,
        )
        sent = convert.open_to_proto(opening).SerializeToString()
        convert.open_from_proto(pb.Open.FromString(sent), num_token_ids=MODEL.num_token_ids)
    except HippoError as error:
        # Media are left out here: their indices are the only thing amiss in a good request.
        return "translated" if "media_index" in error.message else "refused in translation"
    return "translated"


def _state(
    settings: GatewaySettings, folder: str, fetcher: UrlFetcher, patience_is_over: asyncio.Event
) -> GatewayState:
    baselines = {address: Baseline() for address in settings.target}
    uploads = Uploads(folder=folder, max_bytes=1 << 20, max_file_bytes=1 << 20, ttl_s=60.0)
    media = MediaReader(
        fetcher=fetcher, uploads=uploads, allowed_dirs=(), max_items=4, max_bytes=1 << 19
    )
    metrics = GatewayMetrics(
        baselines,
        max_draft_tokens=settings.max_draft_tokens,
        version="0",
        protocol_version=PROTOCOL_VERSION,
    )
    backends = _NoTarget(baselines, (), tls=None, calibration_share=0.0)
    return GatewayState(settings, backends, media, uploads, metrics, "0", patience_is_over)
