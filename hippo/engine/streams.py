"""One gRPC stream is one sequence: what both servicers do with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from hippo.engine.sequence import EngineSequence
from hippo.engine.service import Backend, EngineService
from hippo.engine.slots import SlotPool
from hippo.errors import HippoError, InvalidRequestError
from hippo.logs import request_id_var
from hippo.rpc import codec, convert
from hippo.rpc.errors import Context, answering_errors
from hippo.types import OpenRequest, PromptInfo
from hippo.v1 import common_pb2

_log = logging.getLogger(__name__)

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SequenceStreams:
    """Both servicers' base: reads a stream into the engine and writes what comes of it.

    ``response`` is the message in which the service says something on a stream; ``new_sequence``
    makes a sequence of the service's kind, which claims one of the slots. One writer a stream.
    """

    def __init__(
        self,
        service: EngineService,
        response: type[Message],
        new_sequence: Callable[[OpenRequest, SlotPool], EngineSequence],
    ) -> None:
        self._service = service
        self._response = response
        self._new_sequence = new_sequence
        self._readers: set[asyncio.Task[None]] = set()

    @answering_errors
    async def GetModel(
        self, _: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.GetModelResponse:
        response: common_pb2.GetModelResponse = codec.encode(self._service.info)
        return response

    async def serve(self, context: Context) -> None:
        """Runs one stream to its end; raises what it failed with."""
        with self._service.stream() as backend:
            request = await self._read_open(context, backend)
            request_id_var.set(request.request_id)
            with _logging_the_end():
                sequence = self._new_sequence(request, backend.slots)
                try:
                    await self._run(context, backend, sequence)
                finally:
                    if not sequence.is_submitted:
                        sequence.reservation.release()
                    backend.engine.close(sequence)

    async def _read_open(self, context: Context, backend: Backend) -> OpenRequest:
        first = await _read_message(context)
        kind = "nothing" if first is _EOF else first.WhichOneof("message")
        if kind != "open":
            raise InvalidRequestError(
                f"a stream begins with open, not with {kind or 'an empty message'}", param="open"
            )
        return convert.open_from_proto(first.open, num_token_ids=backend.info.num_token_ids)

    async def _run(self, context: Context, backend: Backend, sequence: EngineSequence) -> None:
        reader = self._start_reader(context, backend, sequence)
        handing_over = asyncio.create_task(self._hand_over(backend, sequence))
        try:
            await asyncio.wait((reader, handing_over), return_when=asyncio.FIRST_COMPLETED)
            # From here on the reader's end ends the output instead of cancelling its writer: a
            # call whose write was cancelled half-way takes no status any more.
            reader.add_done_callback(lambda _: sequence.output.abort(_error_of(reader)))
            if handing_over.done():
                handing_over.result()
            async for message in sequence.output:
                await context.write(codec.wrap(self._response, message))
        finally:
            handing_over.cancel()
            await asyncio.gather(handing_over, return_exceptions=True)
            del handing_over  # its error holds this frame, which holds the sequence

    def _start_reader(
        self, context: Context, backend: Backend, sequence: EngineSequence
    ) -> asyncio.Task[None]:
        """The task that reads the stream; it ends with it.

        Nobody cancels it: grpc.aio never frees what a cancelled read holds
        (https://github.com/grpc/grpc/issues/43360).
        """
        reader = asyncio.create_task(self._read(context, backend, sequence))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        reader.add_done_callback(_error_of)  # seen here when nobody waits for it any more
        return reader

    async def _hand_over(self, backend: Backend, sequence: EngineSequence) -> None:
        """Reads the prompt, waits for the slot, and gives the sequence to the engine."""
        read = await backend.prompts.read(sequence.request)
        prompt = read.prompt
        queued_ns = perf_counter_ns()
        if not await sequence.reservation.wait():
            return  # it failed meanwhile, as its output says
        slot, held = sequence.reservation.take(read.rows)
        info = PromptInfo(
            prompt_hash=prompt.prompt_hash,
            num_prompt_tokens=prompt.length,
            num_visual_tokens=int(prompt.visual_indices.shape[0]),
            queue_ns=perf_counter_ns() - queued_ns,
            preprocess_ns=read.preprocess_ns,
        )
        sequence.announce(info, prompt)
        sequence.is_submitted = True
        backend.engine.submit(sequence, read, slot, held)

    async def _read(self, context: Context, backend: Backend, sequence: EngineSequence) -> None:
        """Posts requests to the engine until the client closes its side."""
        try:
            while (request := await _read_message(context)) is not _EOF:
                num_token_ids = backend.info.num_token_ids
                message = convert.from_stream(request, num_token_ids=num_token_ids)
                backend.engine.post(sequence, message)
        finally:
            del sequence  # gRPC keeps what reading failed with, and that keeps this frame


async def _read_message(context: Context) -> Any:
    try:
        return await context.read()
    except DecodeError:
        raise InvalidRequestError("a message that is none of this protocol's") from None


@contextmanager
def _logging_the_end() -> Iterator[None]:
    """One line a sequence, under its request's id."""
    began_ns = perf_counter_ns()
    how = "left by the gateway"  # the stream was cancelled, as a draft's is when its answer is over
    try:
        yield
        how = "finished"
    except HippoError as error:
        how = f"refused or failed: {error.message}"
        raise
    except Exception:
        how = "failed unexpectedly"
        raise
    finally:
        elapsed_ms = (perf_counter_ns() - began_ns) / 1e6
        _log.info("sequence %s", how, extra={"elapsed_ms": round(elapsed_ms, 1)})


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    error = None if task.cancelled() else task.exception()
    assert error is None or isinstance(error, Exception)
    return error
