"""The spans of a stream's device work, made after it from times that are measured anyway."""

from collections import Counter
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from hippo.base.tracing import Span
from hippo.types import Block, OpenRequest, PromptInfo, Selection, Timing, Verdict


@dataclass(slots=True)
class Stages:
    """When the stages of a sequence began and ended (``perf_counter_ns``); 0: not yet.

    The device thread sets the times. A GPU may end a stage up to one piece of work later.
    """

    tower_began_ns: int = 0
    tower_ended_ns: int = 0
    prefill_began_ns: int = 0
    prefill_ended_ns: int = 0


class StreamRecord:
    """Adds to a stream's span what its messages say, and its stages as children."""

    def __init__(self, span: Span, request: OpenRequest) -> None:
        self._span = span
        self._is_recording = span.is_recording
        self._counts = Counter({"hippo.num_tokens": 0})
        self._device_ns = self._wait_ns = 0
        span.set(
            {
                "hippo.request_id": request.request_id,
                "hippo.choice_index": request.sampling.choice_index,
                "hippo.is_joining": bool(request.committed_ids) or None,
            }
        )

    def note_message(self, message: Any) -> None:
        if not self._is_recording:
            return
        if isinstance(message, Verdict):
            timing, num_tokens = message.timing, len(message.token_ids)
            if message.start_index:
                self._count("hippo.num_forwards", num_tokens, timing.forward_ns, timing.wait_ns)
            else:  # the first token is the prefill's
                self._note_prefill(timing)
        elif isinstance(message, Block):
            num_tokens = len(message.token_ids)
            device_ns = message.step_ns * num_tokens
            self._count("hippo.num_blocks", num_tokens, device_ns, message.wait_ns)
        elif isinstance(message, Timing):
            self._note_prefill(message)
        elif isinstance(message, Selection):
            self._span.add_event(
                "selection",
                num_kept_tokens=len(message.kept_indices),
                num_visual_tokens=message.num_visual_tokens,
                score_ms=message.score_ns / 1e6,
            )
        elif isinstance(message, PromptInfo):
            self._span.set(
                {
                    "hippo.num_prompt_tokens": message.num_prompt_tokens,
                    "hippo.num_visual_tokens": message.num_visual_tokens,
                }
            )

    def _count(self, name: str, num_tokens: int, device_ns: int, wait_ns: int) -> None:
        self._counts.update({name: 1, "hippo.num_tokens": num_tokens})
        self._device_ns += device_ns
        self._wait_ns += wait_ns

    def _note_prefill(self, timing: Timing) -> None:
        self._span.set(
            {
                "hippo.num_cached_tokens": timing.context_length,
                "hippo.prefill_queue_ms": timing.queue_ns / 1e6,
                "hippo.prefill_device_ms": timing.forward_ns / 1e6,
                "hippo.prefill_helper_ms": timing.helper_ns / 1e6,
            }
        )

    def add_stages(self, stages: Stages, ready_ns: int) -> None:
        """Adds the stages so far as children; ``ready_ns`` is the end of the last forward."""
        if not self._is_recording:
            return
        for name, began_ns, ended_ns in (
            ("vision_tower", stages.tower_began_ns, stages.tower_ended_ns),
            ("prefill", stages.prefill_began_ns, stages.prefill_ended_ns),
        ):
            if began_ns:
                self._span.add_child(name, began_ns, ended_ns or perf_counter_ns())
        if stages.prefill_ended_ns:
            times = {
                "hippo.device_ms": self._device_ns / 1e6,
                "hippo.wait_ms": self._wait_ns / 1e6,
            }
            self._span.add_child(
                "decode", stages.prefill_ended_ns, ready_ns, {**self._counts, **times}
            )
