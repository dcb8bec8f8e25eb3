"""Random and mutated streams to real services around a toy model, which must stay whole."""

import asyncio
import io
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from hippo.errors import MediaError
from hippo.models.interface.base import DecodedMedia
from hippo.rpc import codec, convert
from hippo.service.service import EngineService
from hippo.types import Block, FramePlan, Media, Pace, Selection, StepLimits
from hippo.v1 import common_pb2 as pb
from hippo.v1 import draft_pb2, target_pb2
from tests.fuzz.findings import Findings
from tests.fuzz.mutate import generator, mutate_message, mutated, random_message
from tests.support.models.toy_model import ToyDecoder, ToyModel
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

_METHODS = {
    "draft-stream": "/hippo.v1.DraftService/Draft",
    "target-stream": "/hippo.v1.TargetService/Verify",
}
_EXPECTED = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_END_TIMEOUT_S = 10.0
_MOST_FRAMES = 64
_PACE = Pace(StepLimits(0, 4, 0), StepLimits(0, 4, 0), max_ahead=8, block_size=2)


class _LimitedDecoder(ToyDecoder):
    """The toy's, with limits as the real one has."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        count = media.data.partition(b":")[2]
        if not count.isdigit() or len(count) > 9 or not 0 < int(count) <= _MOST_FRAMES:
            raise MediaError("not a toy video")
        return await super().decode(media, plan)


async def fuzz_streams(
    name: str,
    num_inputs: int,
    findings: Findings,
    advance: Callable[[], None],
    *,
    check_every: int = 10,
) -> None:
    """Plays ``num_inputs`` scripts to the service that ``name`` says.

    After each its slots must be free; after every ``check_every`` a good request must be answered
    as before. Statuses must be those of the error tree, and no traceback may be logged.
    """
    serving: Any = serving_draft if name == "draft-stream" else serving_target
    good = _good_draft if name == "draft-stream" else _good_target
    log = io.StringIO()  # what the service says about its own errors
    tracebacks = logging.StreamHandler(log)
    tracebacks.setLevel(logging.ERROR)
    logging.getLogger().addHandler(tracebacks)
    try:
        model = ToyModel()
        async with serving(model, _LimitedDecoder()) as (service, client):
            expected = await good(client)
            num_failed = 0
            async with grpc.aio.insecure_channel(client.address) as channel:
                connected: Any = channel
                method = connected.stream_stream(_METHODS[name])
                for number in range(num_inputs):
                    if number == num_inputs // 10:
                        findings.note_resources("after a tenth")
                    for kept in (model.plans, model.kept, model.tapped, model.reused):
                        kept.clear()  # the toy's records, which would look like a leak
                    rng = generator(findings.seed, number)
                    outcome = await _play(rng, method, script(rng, name))
                    findings.outcomes[outcome.partition(":")[0]] += 1
                    problem = _problem(outcome) or await _left_behind(service)
                    if backend_of(service).engine.counters.num_failed > num_failed:
                        num_failed = backend_of(service).engine.counters.num_failed
                        problem = problem or "a sequence ended by an error of the engine's own"
                    if log.getvalue():
                        problem = problem or "a traceback was logged"
                    if not problem and (number + 1) % check_every == 0:
                        problem = await _check_good(good, client, expected)
                    if problem:
                        findings.fail(number, problem, logged=log.getvalue()[-1500:])
                        log.seek(0)
                        log.truncate()
                    advance()
            findings.note_resources("at the end")
    finally:
        logging.getLogger().removeHandler(tracebacks)


def script(rng: random.Random, name: str) -> list[bytes]:
    """The messages of one stream: a good one's, changed in up to five places."""
    messages = _good_script(rng, name)
    cls = type(messages[0])
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        place = rng.randrange(len(messages) + 1)
        kind = rng.randrange(6)
        if kind == 0 or not messages:
            made = cls()
            random_message(rng, made)
            messages.insert(place, made)
        elif kind == 1:
            messages.insert(place, rng.choice(messages))
        elif kind == 2:
            messages.pop(rng.randrange(len(messages)))
        elif kind == 3:
            rng.shuffle(messages)
        else:
            index = rng.randrange(len(messages))
            changed = cls()
            changed.CopyFrom(messages[index])
            mutate_message(rng, changed)
            messages[index] = changed
    data = [message.SerializeToString() for message in messages]
    if rng.random() < 0.2:
        if data and rng.random() < 0.7:
            index = rng.randrange(len(data))
            data[index] = mutated(rng, data[index], data)
        else:
            data.insert(rng.randrange(len(data) + 1), rng.randbytes(rng.randrange(200)))
    return data


def _good_script(rng: random.Random, name: str) -> list[Any]:
    is_draft = name == "draft-stream"
    pace = codec.encode(_PACE)
    if rng.random() < 0.2:  # the target waits for draft tokens
        for limits in (pace.optimistic, pace.conservative):
            limits.min_draft_tokens = rng.choice((1, 4))
            limits.wait_ns = rng.choice((10**6, 10**9, 2**63, 2**64 - 1))
    opening = convert.open_to_proto(toy_request(max_tokens=rng.choice((1, 4, 12))))
    opening.pace.CopyFrom(pace)
    ids = [rng.randrange(64) for _ in range(12)]
    sizes = [rng.randrange(1, 4) for _ in range(rng.randrange(5))]
    messages: list[Any]
    if is_draft:
        messages = [draft_pb2.DraftRequest(open=opening)]
        if rng.random() < 0.9:
            kept = sorted(rng.sample(range(16), 8))
            select = pb.Selection(kept_indices=kept, num_visual_tokens=16)
            messages.append(draft_pb2.DraftRequest(select=select))
    else:
        messages = [target_pb2.VerifyRequest(open=opening)]
    index = 0
    for size in sizes:
        piece = ids[index : index + size] or [3]
        epoch = rng.choice((0, 0, 0, 1, 2**32 - 1))
        if is_draft:
            commit = pb.Commit(epoch=epoch, start_index=index, token_ids=piece)
            messages.append(draft_pb2.DraftRequest(commit=commit))
        else:
            block = pb.Block(epoch=epoch, start_index=index, token_ids=piece)
            messages.append(target_pb2.VerifyRequest(verify=block))
        index += size
    if rng.random() < 0.3:
        cls = type(messages[0])
        messages.insert(rng.randrange(1, len(messages) + 1), cls(pace=pace))
    return messages


async def _play(rng: random.Random, method: Any, data: list[bytes]) -> str:
    """Sends it all, ends the stream in some way, and returns its status."""
    call = method()
    ending = rng.choice(("close", "close", "close", "cancel"))
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            try:
                for index, message in enumerate(data):
                    if index == 0:
                        await call.write(message)
                    else:  # beneath: a write that meets the end must not overrule the status
                        await call._cython_call.send_serialized_message(message)
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.choice((0, 0, 0.001)))
                if rng.random() < 0.05:
                    await asyncio.sleep(0.02)  # the device comes to rest
                if ending == "close":
                    await call.done_writing()
                else:
                    call.cancel()
            except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                pass  # the service has ended it already
            try:
                while await call.read() is not _EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            except asyncio.CancelledError:
                if ending == "close":
                    raise
            code = await call.code()
            return f"{code.name}: {await call.details()}"
    except TimeoutError:
        call.cancel()
        return "no end"


def _problem(outcome: str) -> str | None:
    name, _, details = outcome.partition(": ")
    is_own = name == "CANCELLED" and "locally" in details.lower()
    return None if is_own or name in _EXPECTED else f"ended with {outcome}"


async def _left_behind(service: EngineService) -> str | None:
    """What the stream left in the service, once it had time to go."""
    for _ in range(2000):
        slots = backend_of(service).slots
        num_sequences = len(backend_of(service).engine._sequences)
        if not slots.num_used and not slots.num_waiting and not num_sequences:
            return None
        await asyncio.sleep(0.002)
    return f"left: {slots.num_used} slots, {slots.num_waiting} waiting, {num_sequences} sequences"


async def _check_good(
    good: Callable[[Any], Awaitable[list[int]]], client: Any, expected: list[int]
) -> str | None:
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            found = await good(client)
    except Exception as error:
        return f"a good request fails: {error!r}"
    return None if found == expected else f"a good request gets {found} in place of {expected}"


async def _good_target(client: Any) -> list[int]:
    return (await target_only(client, toy_request(max_tokens=8))).token_ids


async def _good_draft(client: Any) -> list[int]:
    """The first tokens drafted for a good request."""
    drafted: list[int] = []
    async with client.draft(toy_request(max_tokens=12, pace=_PACE)) as stream:
        await stream.send_message(Selection((1, 3, 5), 16, 0))
        async for message in stream:
            if isinstance(message, Block):
                drafted += message.token_ids
            if len(drafted) >= 4:
                break
    return drafted[:4]
