"""The part of both servicers that connects a gRPC stream with a sequence of the engine."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from hippo.base.local_files import LocalFiles
from hippo.base.logs import request_id_var
from hippo.base.tasks import start_task
from hippo.base.tracing import span
from hippo.engine.sequence import EngineSequence, Submission
from hippo.engine.slots import SlotPool
from hippo.engine.spans import StreamRecord
from hippo.errors import (
    DeadlineError,
    HippoError,
    InvalidRequestError,
    MediaPathError,
    OverloadedError,
)
from hippo.rpc import codec, convert
from hippo.rpc.errors import Context, answering_errors
from hippo.service.backend import Backend
from hippo.service.service import EngineService
from hippo.types import Media, OpenRequest, PromptInfo
from hippo.v1 import common_pb2
from hippo.video.source import opened_path

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_OPEN_S = 60.0  # to send the first message: a large one takes 20 s at 100 Mbit/s
_MOST_UNOPENED = 256  # streams that have not sent it, of all clients together

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SequenceStreams:
    """The servicer of either service: passes a stream's messages to the engine, and writes the
    output.

    ``method`` is the full name of the streaming method, and ``response`` the type of its messages.
    ``new_sequence`` creates the service's sequence, which reserves a slot. One task writes on a
    stream.
    """

    def __init__(
        self,
        service: EngineService,
        method: str,
        response: type[Message],
        new_sequence: Callable[[OpenRequest, SlotPool], EngineSequence],
    ) -> None:
        self._service = service
        self._method = method
        self._response = response
        self._new_sequence = new_sequence
        self._readers: set[asyncio.Task[Any]] = set()
        self._unopened: deque[asyncio.Future[None]] = deque()  # the oldest first

    @answering_errors
    async def GetModel(
        self, _: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.GetModelResponse:
        response: common_pb2.GetModelResponse = codec.encode(self._service.info)
        return response

    @answering_errors
    async def stream(self, _: Any, context: Context) -> None:
        """Runs one stream to its end."""
        caller = dict(context.invocation_metadata() or ())
        attributes = {"rpc.system.name": "grpc", "rpc.method": self._method}
        with (
            span(self._method, kind="server", attributes=attributes, parent=caller) as own,
            self._service.stream() as backend,
        ):
            request = await self._read_open(context, backend)
            request_id_var.set(request.request_id)
            record = StreamRecord(own, request)
            with _logging_the_end():
                sequence = self._new_sequence(request, backend.slots)
                del request  # it holds the media's files, until the prompt is read
                try:
                    await self._run(context, backend, sequence, record)
                finally:
                    if not sequence.is_submitted:
                        sequence.reservation.release()
                    backend.engine.close_sequence(sequence)
                    record.add_stages(sequence.stages, sequence.ready_ns)

    Draft = Verify = stream  # the method's names in the two services

    async def _read_open(self, context: Context, backend: Backend) -> OpenRequest:
        first = await self._read_first(context)
        kind = "nothing" if first is _EOF else first.WhichOneof("message")
        if kind != "open":
            raise InvalidRequestError(
                f"a stream begins with open, not with {kind or 'an empty message'}", param="open"
            )
        request = convert.open_from_proto(first.open, num_token_ids=backend.info.num_token_ids)
        if any(item.path for item in request.media):
            media = await asyncio.to_thread(_checked_paths, request.media, backend.files)
            request = replace(request, media=media)
        return request

    async def _read_first(self, context: Context) -> Any:
        """Returns a stream's first message. Raises DeadlineError if it does not come, and
        OverloadedError if so many streams came since that this is the oldest without one."""
        given_up = asyncio.get_running_loop().create_future()
        if len(self._unopened) >= _MOST_UNOPENED:
            self._unopened.popleft().set_result(None)
        self._unopened.append(given_up)
        reading = self._keep(_read_message(context))
        try:
            await asyncio.wait(
                (reading, given_up), timeout=_OPEN_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if not given_up.done():
                self._unopened.remove(given_up)
        if reading.done():
            return reading.result()
        if given_up.done():
            raise OverloadedError(
                f"the stream sent no open message, and {_MOST_UNOPENED} later streams wait too; "
                "try again, and send open at once"
            )
        raise DeadlineError(f"the stream sent no open message within {_OPEN_S:g} s")

    async def _run(
        self, context: Context, backend: Backend, sequence: EngineSequence, record: StreamRecord
    ) -> None:
        reader = self._keep(self._read(context, backend, sequence))
        handing_over = start_task(self._hand_over(backend, sequence))
        try:
            await asyncio.wait((reader, handing_over), return_when=asyncio.FIRST_COMPLETED)
            # From here on the end of the reader ends the output. It must not cancel the writer: a
            # call whose write was cancelled cannot send a status any more.
            reader.add_done_callback(lambda _: sequence.output.abort(_error_of(reader)))
            if handing_over.done():
                handing_over.result()
            async for message in sequence.output:
                record.note_message(message)
                await context.write(codec.wrap(self._response, message))
        finally:
            handing_over.cancel()
            await asyncio.gather(handing_over, return_exceptions=True)

    def _keep(self, reading: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Starts a task that reads, and keeps it until it is done.

        It must not be cancelled, because grpc.aio never frees the memory of a cancelled read
        (https://github.com/grpc/grpc/issues/43360).
        """
        reader = start_task(reading)
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        reader.add_done_callback(_error_of)  # or asyncio would log an error that was not read
        return reader

    async def _hand_over(self, backend: Backend, sequence: EngineSequence) -> None:
        """Reads the prompt when a slot is near, waits for the slot, and gives the sequence to the
        engine."""
        queued_ns = perf_counter_ns()
        if not await sequence.reservation.wait_near():
            return  # the sequence has ended
        read = await backend.prompts.read_prompt(sequence.request)
        sequence.request = replace(sequence.request, media=())
        prompt = read.prompt
        if not await sequence.reservation.wait_granted():
            return
        slot, held = sequence.reservation.take_slot(read.rows)
        info = PromptInfo(
            prompt_hash=prompt.prompt_hash,
            num_prompt_tokens=prompt.length,
            num_visual_tokens=int(prompt.visual_indices.shape[0]),
            queue_ns=perf_counter_ns() - queued_ns - read.preprocess_ns,
            preprocess_ns=read.preprocess_ns,
            media=prompt.media,
            is_thinking=prompt.thought_end_id is not None,
        )
        sequence.announce_prompt(info, prompt)
        sequence.is_submitted = True
        backend.engine.submit_sequence(
            sequence, Submission(read, slot, held, submitted_ns=perf_counter_ns())
        )

    async def _read(self, context: Context, backend: Backend, sequence: EngineSequence) -> None:
        """Posts requests to the engine until the client closes its side."""
        num_token_ids = backend.info.num_token_ids
        while (request := await _read_message(context)) is not _EOF:
            message = convert.from_stream(request, num_token_ids=num_token_ids)
            backend.engine.post_message(sequence, message)


async def _read_message(context: Context) -> Any:
    try:
        return await context.read()
    except DecodeError:
        raise InvalidRequestError(
            "the stream has a message that is not of hippo's protocol; send the messages of "
            "protos/hippo/v1"
        ) from None


def _checked_paths(media: tuple[Media, ...], files: LocalFiles) -> tuple[Media, ...]:
    """Returns the media, with the links in their paths resolved.

    Raises MediaPathError as ``opened_path`` does, with the item as ``param``.
    """
    checked = []
    for index, item in enumerate(media):
        if item.path:
            try:
                with opened_path(item, files) as file:
                    item = replace(item, path=str(file.path))
            except MediaPathError as error:
                error.param = f"media[{index}]"
                raise
        checked.append(item)
    return tuple(checked)


@contextmanager
def _logging_the_end() -> Iterator[None]:
    """Logs one line at the end of a sequence, with its request id."""
    began_ns = perf_counter_ns()
    how = "left by the gateway"  # cancelled, as a draft's stream at the end of an answer
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


def _error_of(task: asyncio.Task[Any]) -> Exception | None:
    error = None if task.cancelled() else task.exception()
    assert error is None or isinstance(error, Exception)
    return error
