"""The order of messages on both streams, on real servers: each breach and its status."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from hippo.engine.service import EngineService
from hippo.rpc import codec, convert
from hippo.types import OpenRequest, Pace, StepLimits
from hippo.v1 import common_pb2 as pb
from hippo.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.services import serving_draft, serving_target, stats_of, toy_request, until
from tests.support.toy_model import NUM_TOKEN_IDS, ToyModel

DRAFTS = Pace(StepLimits(0, 4, 0), StepLimits(0, 4, 0), max_ahead=8, block_size=2)
OPEN = convert.open_to_proto(toy_request(pace=DRAFTS))
SELECT = pb.Selection(kept_indices=[1, 3], num_visual_tokens=16)
COMMIT = pb.Commit(start_index=0, token_ids=[5])
PACE = codec.encode(DRAFTS)
BAD_PACE = pb.Pace(block_size=0)
FOREIGN_ID = NUM_TOKEN_IDS


@pytest.fixture
async def draft() -> AsyncIterator[tuple[EngineService, str]]:
    async with serving_draft(ToyModel()) as (service, client):
        yield service, client.address


@pytest.fixture
async def target() -> AsyncIterator[tuple[EngineService, str]]:
    async with serving_target(ToyModel()) as (service, client):
        yield service, client.address


_METHODS = {
    "Draft": "/hippo.v1.DraftService/Draft",
    "Verify": "/hippo.v1.TargetService/Verify",
}


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


async def _end(address: str, method: str, messages: list[Any]) -> grpc.aio.AioRpcError:
    """Sends the messages without closing, and returns the status that the server ends with."""
    async with grpc.aio.insecure_channel(address) as channel:
        connected: Any = channel
        call = connected.stream_stream(_METHODS[method], request_serializer=_serialized)()
        for message in messages:
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                break  # the server has ended it already
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        return caught.value


def _request(cls: Any, **message: Any) -> Any:
    return cls(**message)


D, V = draft_pb2.DraftRequest, target_pb2.VerifyRequest


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([D(pace=PACE)], "begins with open, not with pace"),
        ([D()], "begins with open"),
        ([D(open=OPEN), D(open=OPEN)], "open came twice"),
        ([D(open=OPEN), D(select=SELECT), D(select=SELECT)], "select came twice"),
        ([D(open=OPEN), D()], "empty message"),
        ([D(open=OPEN), D(pace=BAD_PACE)], "block_size"),
        ([D(open=OPEN), D(commit=pb.Commit())], "no token ids"),
        ([D(open=OPEN), D(commit=pb.Commit(token_ids=[FOREIGN_ID]))], "token ids are 0 to"),
        ([D(open=OPEN), D(commit=pb.Commit(start_index=5, token_ids=[3]))], "gap"),
        ([D(open=OPEN), D(commit=pb.Commit(epoch=2**32 - 1, token_ids=[3]))], "commit.epoch is"),
        ([D(open=OPEN), D(commit=pb.Commit(token_ids=[3] * 61))], "reaches 61 tokens"),
        ([D(open=OPEN), b"\xff\xff\xff"], "none of this protocol's"),
        ([b"\0"], "none of this protocol's"),
        ([D(open=OPEN), D(select=pb.Selection(kept_indices=[3, 1]))], "ascend"),
        ([D(open=OPEN), D(select=pb.Selection(num_visual_tokens=15))], "different frames"),
    ],
)
async def test_a_breach_of_the_draft_streams_order_is_invalid_and_frees_the_slot(
    draft: tuple[EngineService, str], messages: list[Any], words: str
) -> None:
    service, address = draft

    status = await _end(address, "Draft", messages)

    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (status.details() or "")
    await until(lambda: stats_of(service).num_slots_used == 0)
    await until(lambda: stats_of(service).counters.num_sequences == 0)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([V(verify=pb.Block(token_ids=[3]))], "begins with open, not with verify"),
        ([V(open=OPEN), V(open=OPEN)], "open came twice"),
        ([V(open=OPEN), V()], "empty message"),
        ([V(open=OPEN), V(verify=pb.Block())], "no token ids"),
        ([V(open=OPEN), V(verify=pb.Block(token_ids=[FOREIGN_ID]))], "token ids are 0 to"),
        ([V(open=OPEN), V(pace=BAD_PACE)], "block_size"),
        ([V(open=OPEN), V(verify=pb.Block(epoch=2**32 - 1, token_ids=[3]))], "verify.epoch is"),
        ([V(open=OPEN), b"\xff\xff\xff"], "none of this protocol's"),
    ],
)
async def test_a_breach_of_the_target_streams_order_is_invalid_and_frees_the_slot(
    target: tuple[EngineService, str], messages: list[Any], words: str
) -> None:
    service, address = target
    service.host.backend.engine.model.on_forward = _slowly  # type: ignore[union-attr]

    status = await _end(address, "Verify", messages)

    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (status.details() or "")
    await until(lambda: stats_of(service).num_slots_used == 0)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"media": ()}, grpc.StatusCode.INVALID_ARGUMENT, "media_index"),
        ({"max_tokens": 500}, grpc.StatusCode.INVALID_ARGUMENT, "together 529"),
        ({"committed_ids": (3,)}, grpc.StatusCode.INVALID_ARGUMENT, "begins at token 0"),
        ({"end_token_ids": (FOREIGN_ID,)}, grpc.StatusCode.INVALID_ARGUMENT, "end_token_ids"),
    ],
)
async def test_a_request_that_the_target_cannot_take_is_refused(
    target: tuple[EngineService, str],
    changes: dict[str, Any],
    code: grpc.StatusCode,
    words: str,
) -> None:
    service, address = target
    request: OpenRequest = dataclasses.replace(toy_request(), **changes)
    opening = V(open=convert.open_to_proto(request))

    status = await _end(address, "Verify", [opening])

    assert status.code() is code
    assert words in (status.details() or "")
    await until(lambda: stats_of(service).num_slots_used == 0)


@pytest.mark.parametrize("method", ["Draft", "Verify"])
async def test_another_protocol_version_is_a_failed_precondition(
    draft: tuple[EngineService, str], target: tuple[EngineService, str], method: str
) -> None:
    other = pb.Open()
    other.CopyFrom(OPEN)
    other.protocol_version = 2
    if method == "Draft":
        status = await _end(draft[1], method, [_request(D, open=other)])
    else:
        status = await _end(target[1], method, [_request(V, open=other)])

    assert status.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol version 2" in (status.details() or "")


async def test_a_client_that_closes_its_side_ends_the_sequence_in_good_order(
    draft: tuple[EngineService, str],
) -> None:
    service, address = draft
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        call = stub.Draft()
        await call.write(D(open=OPEN))
        await call.write(D(select=SELECT))
        assert (await call.read()).WhichOneof("message") == "prompt"
        assert (await call.read()).WhichOneof("message") == "prefill"
        assert (await call.read()).WhichOneof("message") == "block"
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
        assert await call.code() is grpc.StatusCode.OK

    await until(lambda: stats_of(service).num_slots_used == 0)


async def test_a_stream_that_says_nothing_is_invalid(
    target: tuple[EngineService, str],
) -> None:
    async with grpc.aio.insecure_channel(target[1]) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.Verify()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_wait_for_ages_leaves_the_service_whole(
    target: tuple[EngineService, str],
) -> None:
    service, address = target
    ages = StepLimits(4, 4, 2**64 - 1)
    opening = convert.open_to_proto(toy_request(pace=Pace(ages, ages, 8, 2)))
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        waiting = stub.Verify()
        await waiting.write(V(open=opening))
        while (await waiting.read()).WhichOneof("message") != "verdict":
            pass
        await asyncio.sleep(0.05)  # the device waits for draft tokens
        hurried = stub.Verify()
        await hurried.write(V(open=convert.open_to_proto(toy_request(max_tokens=3))))
        while await hurried.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass
        assert await hurried.code() is grpc.StatusCode.OK
        waiting.cancel()
    await until(lambda: stats_of(service).num_slots_used == 0)


def _slowly(_: Any) -> None:
    """Long enough for the messages after open to arrive before the sequence is over."""
    import time

    time.sleep(0.01)
