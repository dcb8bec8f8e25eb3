"""A service from its port to its end: health, reflection, draining, metrics, slots, coming back."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hippo.engine.warmup import run_longest, warm_prompt
from hippo.errors import (
    DeadlineError,
    HippoError,
    ModelLoadError,
    OverloadedError,
    UnavailableError,
)
from hippo.metrics import SERVICE_METRICS
from hippo.models.interface.base import StepPlan
from hippo.models.products.linear import padded_rows
from hippo.pruning.select import default_score_layers
from hippo.rpc.client import DRAFT_SERVICE, TARGET_SERVICE, DraftClient, TargetClient
from hippo.service.service import EngineService
from hippo.types import Pace, PromptInfo, StepLimits
from tests.support.models.toy_model import ToyDecoder, ToyModel
from tests.support.running.gate import Gate
from tests.support.running.gateways import CHAT, serving_toys, toy_chat
from tests.support.running.services import (
    backend_of,
    build_draft,
    build_target,
    ready_client,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)
from tests.support.running.stack import value_of
from tests.support.watching.metrics import check_exported

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def started(
    service: EngineService, port: int = 0, **options: Any
) -> AsyncIterator[TargetClient]:
    """Yields a client of a service without a model."""
    client = TargetClient(f"127.0.0.1:{await service.start('127.0.0.1', port, **options)}")
    try:
        yield client
    finally:
        await client.close()
        await service.stop()


async def test_health_is_not_serving_until_warm_and_while_draining() -> None:
    service = build_target()
    async with started(service) as client, grpc.aio.insecure_channel(client.address) as channel:
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=TARGET_SERVICE)
        )
        assert (await watch.read()).status == NOT_SERVING
        assert await client.health_problem()
        with pytest.raises(UnavailableError, match="loading"):
            await client.get_model()
        with pytest.raises(UnavailableError, match="loading"):
            await target_only(client, toy_request())

        await service.serve_model(ToyModel(), ToyDecoder())
        assert (await watch.read()).status == SERVING
        assert await client.health_problem() is None
        assert (await client.get_model()).num_slots == 2

        await service.drain(1)
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(UnavailableError, match="shutting down"):
            await target_only(client, toy_request())
        watch.cancel()


async def test_warming_up_runs_forwards_of_every_size_on_the_device_thread() -> None:
    model = ToyModel()
    async with serving_target(model):
        pass

    sizes = [plan.num_rows for plan in model.plans]
    assert sizes == sorted({padded_rows(number) for number in range(1, 129)})
    assert model.threads == {"device"}


async def test_a_first_prompt_is_scored_by_the_layers_that_score_later_ones() -> None:
    draft, target, half = ToyModel(), ToyModel(), ToyModel()
    async with serving_draft(draft), serving_target(target, score_layers=1), serving_target(half):
        pass
    assert (draft.tapped, target.tapped) == ([None], [1])
    assert half.tapped == [default_score_layers(half.num_layers)]
    longest = warm_prompt(draft)
    for num_tapped in (0, 2):
        run_longest(draft, longest, slot=0, num_tapped=num_tapped)
    assert draft.tapped == [None, None, 2]


async def test_a_model_that_fails_its_first_forward_is_a_load_error() -> None:
    def fail(_: StepPlan) -> None:
        raise RuntimeError("out of memory")

    model = ToyModel()
    model.on_forward = fail
    service = build_target()
    async with started(service):
        with pytest.raises(ModelLoadError, match="first forwards fail: out of memory"):
            await service.serve_model(model, ToyDecoder())


async def test_draining_lets_running_sequences_finish() -> None:
    model = ToyModel()
    gate = Gate()
    async with serving_target(model) as (service, client):
        model.on_piece = gate
        async with client.verify(toy_request(max_tokens=5, end_token_ids=())) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            draining = asyncio.create_task(service.drain(30))
            with pytest.raises(UnavailableError):
                while True:  # until the service has heard of it
                    await target_only(client, toy_request(max_tokens=1))
            gate.open()
            messages = [message async for message in stream]
        await draining

    assert len(messages) == 6  # the selection and five verdicts


async def test_draining_ends_after_its_time_and_stopping_ends_what_still_runs() -> None:
    async with serving_draft(ToyModel()) as (service, client):
        async with client.draft(toy_request()) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            await service.drain(0.05)
            await service.stop()
            with pytest.raises(UnavailableError):
                await anext(stream)


async def test_a_taken_port_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = build_target()
        with pytest.raises(HippoError, match=f"cannot listen on 127.0.0.1:{port}"):
            await service.start("127.0.0.1", port)
        await service.stop()


@pytest.mark.parametrize("has_reflection", [False, True])
async def test_the_interface_is_described_if_the_operator_says_so(has_reflection: bool) -> None:
    async with (
        started(build_draft(reflection=has_reflection)) as client,
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call: Any = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        if not has_reflection:
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        listed = (await call.read()).list_services_response.service
        call.cancel()
    assert {entry.name for entry in listed} >= {DRAFT_SERVICE, "grpc.health.v1.Health"}


@pytest.mark.parametrize(("host", "is_exposed"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_service_that_others_reach_without_tls_says_so(
    host: str, is_exposed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = build_target()
    await service.start(host, 0)
    await service.stop()
    assert ("--tls-cert" in caplog.text) == is_exposed


async def test_a_service_that_is_not_there_is_named_by_its_address() -> None:
    client = DraftClient("127.0.0.1:9")
    try:
        with pytest.raises(UnavailableError, match=r"draft service at 127\.0\.0\.1:9"):
            await client.get_model()
        assert await client.health_problem()
    finally:
        await client.close()


async def test_a_client_finds_a_service_that_comes_back_on_its_port() -> None:
    async with serving_target(ToyModel()) as (first, _):
        port = first.port or 0
        async with ready_client(TargetClient, port) as client:
            await first.stop()
            assert await client.health_problem()
            with pytest.raises(UnavailableError):
                await target_only(client, toy_request())

            second = build_target()
            async with started(second, port):
                await second.serve_model(ToyModel(), ToyDecoder())
                while await client.health_problem():
                    await asyncio.sleep(0.02)
                assert (await target_only(client, toy_request())).token_ids


async def test_the_metrics_show_slots_and_forwards() -> None:
    service = build_target()
    async with started(service, metrics_port=0) as client:
        url = f"http://127.0.0.1:{service.metrics_port}/metrics"
        async with httpx.AsyncClient(trust_env=False) as http:
            assert "hippo_slots" not in (await http.get(url)).text
            await service.serve_model(ToyModel(), ToyDecoder())
            await target_only(client, toy_request(max_tokens=5, end_token_ids=()))
            await until_free(service)
            await target_only(client, toy_request("what else?", max_tokens=1))
            await until_free(service)
            text = (await http.get(url)).text
    num_shared, num_rows = 16 + len("what "), 2 * 16 + len("what happens?what else?")
    expected = {
        "hippo_slots": 2,
        "hippo_sequences_total": 2,
        "hippo_prefix_cache_hits_total": 1,
        "hippo_prefill_cached_tokens_total": num_shared,
        "hippo_prefill_tokens_total": num_rows,
        "hippo_vision_cache_used_bytes": 256,
        "hippo_vision_cache_capacity_bytes": 256e6,
        "hippo_media_cache_hits_total": 1,
        "hippo_media_cache_capacity_bytes": 256e6,
        "hippo_forward_seconds_count": 4,
    }
    assert {name: value_of(text, f"{name} ") for name in expected} == expected
    assert value_of(text, "hippo_device_memory_used_bytes") > 0
    check_exported(text, SERVICE_METRICS)


async def test_what_is_called_on_the_device_thread_gives_raises_or_is_given_up() -> None:
    async with serving_target(ToyModel()) as (service, client):
        engine = backend_of(service).engine
        names: list[str] = []
        await engine.call(lambda: names.append(threading.current_thread().name))
        assert names == ["device"]
        assert await engine.call(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        go_on = threading.Event()
        calling = asyncio.create_task(engine.call(go_on.wait))
        await asyncio.sleep(0)
        calling.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert (await target_only(client, toy_request())).token_ids


async def test_more_requests_than_slots_and_queue_are_turned_away_and_the_queue_moves_on() -> None:
    model = ToyModel(num_slots=1)
    gate = Gate()
    async with serving_toys(model, max_waiting=1) as http:
        model.on_piece = gate
        asking = [asyncio.create_task(http.post(CHAT, json=toy_chat())) for _ in range(3)]
        (first,), others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        refused = first.result()
        gate.open()
        answers = await asyncio.gather(*others)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "overloaded"
    assert "all 1 slots are taken, and 1 of 1 places" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_sequence_over_its_time_is_ended_and_its_slot_free() -> None:
    patient = StepLimits(4, 4, wait_ns=10**15)
    request = toy_request(pace=Pace(patient, patient, 8, 4), end_token_ids=())
    async with serving_target(ToyModel()) as (service, client):
        async with client.verify(request, timeout_s=0.5) as stream:
            with pytest.raises(DeadlineError):
                async for _ in stream:
                    pass
            await until_free(service)
    async with serving_draft(ToyModel()) as (service, drafter):
        async with drafter.draft(request, timeout_s=0.5) as drafting:
            with pytest.raises(DeadlineError):
                async for _ in drafting:
                    pass
            await until_free(service)


async def test_giving_up_in_the_queue_frees_the_place() -> None:
    model = ToyModel(num_slots=1)
    async with serving_target(model, max_waiting=1) as (service, client):
        gate = Gate()
        model.on_piece = gate
        async with client.verify(toy_request()) as running:
            assert isinstance(await anext(running), PromptInfo)
            queued = asyncio.create_task(target_only(client, toy_request()))
            await until(lambda: backend_of(service).slots.num_waiting == 1)
            queued.cancel()
            await until(lambda: backend_of(service).slots.num_waiting == 0)
            gate.open()


async def test_without_a_free_slot_the_draft_refuses_at_once() -> None:
    async with serving_draft(ToyModel(num_slots=1)) as (_, client):
        async with client.draft(toy_request()) as holding:
            assert isinstance(await anext(holding), PromptInfo)
            async with client.draft(toy_request()) as refused:
                with pytest.raises(OverloadedError, match="all 1 slots are taken"):
                    await anext(refused)
