"""What both streams of a completion share: the request, the coordinator, and where messages go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import report
from gateway.answer.report import AnswerRecord
from gateway.pairs.targets import Pair
from hippo.errors import HippoError, IncompatiblePairError, MediaPathError
from hippo.rpc.client import DraftStream, TargetStream
from hippo.speculation.coordinator import Action, Coordinator, ToTarget
from hippo.types import Media, OpenRequest

logger = logging.getLogger("gateway.answer.completion")

CopyFiles = Callable[[], Awaitable[tuple[Media, ...]]]


@dataclass(slots=True)
class StreamPair:
    """The messages of one completion between a target and a draft.

    ``pair`` has the target that is asked. ``target_stream`` and ``draft_stream`` are None before
    they are first opened, ``draft_stream`` also after a loss. ``begun`` is set when the target has
    read the prompt, and so has a slot for it.
    ``copy_files`` returns the media with the bytes of files that a service cannot open by path;
    services end the sequence ``timeout_s`` after the request's arrival (None: no limit).
    """

    request: OpenRequest
    coordinator: Coordinator
    pair: Pair
    record: AnswerRecord
    copy_files: CopyFiles
    timeout_s: float | None
    target_stream: TargetStream | None = None
    draft_stream: DraftStream | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until a service ends the sequence; None: no limit."""
        return report.seconds_left(self.timeout_s, self.record.received_ns)

    async def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            stream = self.target_stream if isinstance(action, ToTarget) else self.draft_stream
            await self.send_message(stream, action.message)

    async def send_message(self, stream: TargetStream | DraftStream | None, message: Any) -> None:
        """Sends a message; if the stream is broken, the task that reads it raises the error."""
        if stream is not None:
            with contextlib.suppress(HippoError):
                await stream.send_message(message)

    async def fall_back_to_bytes(self, error: MediaPathError) -> None:
        """Sends files as bytes from now on, because a service cannot open one of them by its path;
        raises MediaError for files that are too large for a message."""
        logger.warning("files are sent as bytes: %s", error.message)
        self.request = dataclasses.replace(self.request, media=await self.copy_files())

    def check_prompts(self) -> None:
        """Raises IncompatiblePairError when the two services read different prompts."""
        target, draft = self.record.target_prompt, self.record.draft_prompt
        if target is not None and draft is not None and target.prompt_hash != draft.prompt_hash:
            raise IncompatiblePairError("the draft read another prompt than the target")
