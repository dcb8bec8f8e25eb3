"""The order of messages on both streams, on real servers: each breach and its status."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from hippo.rpc import codec, convert
from hippo.types import Pace, StepLimits
from hippo.v1 import common_pb2 as pb
from hippo.v1 import draft_pb2, draft_pb2_grpc, target_pb2
from tests.support.models.toy_model import NUM_TOKEN_IDS, ToyModel
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_target,
    toy_request,
    until,
    until_free,
)

DRAFTS = Pace(StepLimits(0, 4, 0), StepLimits(0, 4, 0), max_ahead=8, block_size=2)
SELECT = pb.Selection(kept_indices=[1, 3], num_visual_tokens=16)
PACE = codec.encode(DRAFTS)
BAD_PACE = pb.Pace(block_size=0)
FOREIGN_ID = NUM_TOKEN_IDS
FAR = 2**31 + 1


def _open(**changes: Any) -> pb.Open:
    return convert.open_to_proto(toy_request(**({"pace": DRAFTS} | changes)))


OPEN, OTHER = _open(), _open()
OTHER.protocol_version = 2
D, V = draft_pb2.DraftRequest, target_pb2.VerifyRequest

_SERVING: dict[str, Any] = {"Draft": serving_draft, "Verify": serving_target}
_SERVICES = {"Draft": "DraftService", "Verify": "TargetService"}


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


async def _end(address: str, method: str, messages: list[Any]) -> grpc.aio.AioRpcError:
    """Sends the messages, closes if there are none, and returns the status that it ends with."""
    async with grpc.aio.insecure_channel(address) as channel:
        connected: Any = channel
        path = f"/hippo.v1.{_SERVICES[method]}/{method}"
        call = connected.stream_stream(path, request_serializer=_serialized)()
        for message in messages:
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                break  # the server has ended it already
        if not messages:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        return caught.value


@pytest.mark.parametrize(
    ("method", "messages", "words"),
    [
        ("Draft", [D(pace=PACE)], "begins with open, not with pace"),
        ("Draft", [D()], "begins with open"),
        ("Draft", [D(open=OPEN), D(open=OPEN)], "open came twice"),
        ("Draft", [D(open=OPEN), D(select=SELECT), D(select=SELECT)], "select came twice"),
        ("Draft", [D(open=OPEN), D()], "an empty message; expected select or pace or commit"),
        ("Draft", [D(open=OPEN), D(pace=BAD_PACE)], "block_size"),
        ("Draft", [D(open=OPEN), D(commit=pb.Commit())], "settles at least one token"),
        ("Draft", [D(open=OPEN), D(commit=pb.Commit(token_ids=[FOREIGN_ID]))], "token ids are 0"),
        ("Draft", [D(open=OPEN), D(commit=pb.Commit(start_index=5, token_ids=[3]))], "gap"),
        ("Draft", [D(open=OPEN), D(commit=pb.Commit(epoch=FAR, token_ids=[3]))], "commit.epoch is"),
        ("Draft", [D(open=OPEN), D(commit=pb.Commit(token_ids=[3] * 61))], "reaches 61 tokens"),
        ("Draft", [D(open=OPEN), b"\xff\xff\xff"], "not of hippo's protocol"),
        ("Draft", [b"\0"], "not of hippo's protocol"),
        ("Draft", [D(open=OPEN), D(select=pb.Selection(kept_indices=[3, 1]))], "ascend"),
        (
            "Draft",
            [D(open=OPEN), D(select=pb.Selection(num_visual_tokens=15))],
            "has 16 here: draft",
        ),
        ("Verify", [V(verify=pb.Block(token_ids=[3]))], "begins with open, not with verify"),
        ("Verify", [V(open=OPEN), V(open=OPEN)], "open came twice"),
        ("Verify", [V(open=OPEN), V()], "an empty message; expected pace or verify"),
        ("Verify", [V(open=OPEN), V(verify=pb.Block())], "no token ids"),
        ("Verify", [V(open=OPEN), V(verify=pb.Block(token_ids=[FOREIGN_ID]))], "token ids are 0"),
        ("Verify", [V(open=OPEN), V(pace=BAD_PACE)], "block_size"),
        ("Verify", [V(open=OPEN), V(verify=pb.Block(epoch=FAR, token_ids=[3]))], "verify.epoch is"),
        ("Verify", [V(open=OPEN), b"\xff\xff\xff"], "not of hippo's protocol"),
        ("Verify", [V(open=_open(media=()))], "media_index"),
        ("Verify", [V(open=_open(max_tokens=500))], "together 529"),
        ("Verify", [V(open=_open(committed_ids=(3,)))], "begins at token 0"),
        ("Verify", [], ""),
        ("Draft", [D(open=OTHER)], "protocol version 2"),
        ("Verify", [V(open=OTHER)], "protocol version 2"),
    ],
)
async def test_a_breach_of_a_streams_order_ends_it_with_its_status_and_frees_the_slot(
    method: str, messages: list[Any], words: str
) -> None:
    model = ToyModel()
    async with _SERVING[method](model) as (service, client):
        # Long enough for the messages after open to arrive before the sequence is over.
        model.on_forward = lambda plan: time.sleep(0.01)

        status = await _end(client.address, method, messages)

        is_other = words.startswith("protocol version")
        code = "FAILED_PRECONDITION" if is_other else "INVALID_ARGUMENT"
        assert status.code().name == code
        assert words in (status.details() or "")
        await until_free(service)
        await until(lambda: not backend_of(service).engine._sequences)


async def test_a_client_that_closes_its_side_ends_the_sequence_in_good_order() -> None:
    async with serving_draft(ToyModel()) as (service, client):
        async with grpc.aio.insecure_channel(client.address) as channel:
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
        await until_free(service)
