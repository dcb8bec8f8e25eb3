"""Answers of a random pair about clips, end to end through services and gateway, and its memory."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from bench.answers.memory import LARGEST_RESIDENT, process_megabytes
from bench.answers.runs import FORM, pids_of, running_stack
from bench.answers.systems import TARGET_ONLY, System
from bench.base.clips import data_url
from bench.base.report import Report
from bench.shapes.random_pair import LETTERS
from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import PROCESS_BYTES, RESERVED_BYTES, memory_of
from hippo.cli.stack import Stack, StackOptions
from hippo.client.answers import Answer
from hippo.client.requests import question_about
from hippo.client.server import Connection, Server
from hippo.models.attention.cache import cache_dtype
from hippo.models.interface.context import pruned_cache_tokens
from hippo.models.loading.placement import DTYPES
from hippo.models.products.linear import packs_weights

_EVERY_S = 0.1
_WARM_UP_TOKENS = 24

ANSWER_COLUMNS = {
    "clip": ("clip", ""),
    "prompt tokens": ("prompt_tokens", ",d"),
    "share": ("share", ".2f"),
    "system": ("system", ""),
    "accepted": ("acceptance_rate", ".2f"),
    "tokens/forward": ("tokens_per_forward", ".2f"),
    "first token s": ("ttft_s", ".2f"),
    "target step ms": ("target_step_ms", ".2f"),
    "draft step ms": ("draft_step_ms", ".2f"),
    "ms/token": ("ms_per_token", ".2f"),
    "decode": ("decode_speedup", ".2f"),
    "end to end": ("end_to_end_speedup", ".2f"),
    "equal": ("is_equal", ""),
}
_MEMORY_COLUMNS = {
    "where": ("where", ""),
    "computed, bytes": ("computed", ",.0f"),
    "largest seen, bytes": ("seen", ",.0f"),
    "seen / computed": ("over_computed", ".2f"),
}


@dataclass(frozen=True, slots=True)
class NamedClip:
    """A clip, and the ``max_pixels`` of its frames in requests."""

    name: str
    data: bytes
    max_pixels: int


class PeakMemory:
    """The largest memory seen, by device on CUDA devices and by process, in bytes.

    Pages of files, such as weights, count apart: the kernel drops them when memory is short.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.peaks: dict[str, float] = {}
        cuda = sorted({device for device in devices if device.startswith("cuda")})
        self._before = {device: _used_bytes(device) for device in cuda}

    def watch(self, pids: Mapping[str, int], stop: threading.Event) -> None:
        """Reads the memory several times a second until ``stop``."""
        while True:
            with suppress(psutil.Error, OSError):  # a process has just ended
                for name, used in self._read(pids).items():
                    self.peaks[name] = max(used, self.peaks.get(name, 0.0))
            if stop.wait(_EVERY_S):
                return

    def _read(self, pids: Mapping[str, int]) -> dict[str, float]:
        seen = {name: 1e6 * used for name, used in process_megabytes(pids).items()}
        for name, used in process_megabytes(pids, LARGEST_RESIDENT).items():
            seen[f"{name}, with pages of files"] = 1e6 * used
        for device, before in self._before.items():
            seen[device] = _used_bytes(device) - before
        return seen


@contextmanager
def watched_stack(
    options: StackOptions, report: Report, *, num_tokens: int, num_slots: int
) -> Iterator[Stack]:
    """Starts a stack and watches its memory from its start on; yields it when it is ready.

    When the block is left, in whatever way, a table of the report gets the memory that was seen
    beside the memory that hippo.catalog.sizes computes.
    """
    memory = PeakMemory((options.target_device, options.draft_device))
    stop = threading.Event()

    def begin(stack: Stack) -> None:
        watching.submit(memory.watch, pids_of(stack), stop)

    with ThreadPoolExecutor(1) as watching:
        try:
            with running_stack(options, on_start=begin) as stack:
                yield stack
        finally:
            stop.set()
            watching.shutdown()
            report.begin_table("memory", _MEMORY_COLUMNS)
            computed = _computed_bytes(options, num_tokens, num_slots)
            for name, seen in memory.peaks.items():
                over = seen / computed[name] if name in computed else None
                row = {"where": name, "computed": computed.get(name), "seen": seen}
                report.add_row({**row, "over_computed": over})


def _used_bytes(device: str) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _computed_bytes(options: StackOptions, num_tokens: int, num_slots: int) -> dict[str, float]:
    """Returns the memory that hippo.catalog.sizes computes, by device or, on a CPU, by service."""
    dtype = DTYPES[options.dtype]
    computed: dict[str, float] = {}
    for role, device, model in (
        ("target", options.target_device, options.target_model),
        ("draft", options.draft_device, options.draft_model),
    ):
        on_gpu = device.startswith("cuda")
        memory = memory_of(
            find_shape(model),
            num_tokens=num_tokens,
            num_slots=num_slots,
            cache_tokens=pruned_cache_tokens(num_tokens) if role == "draft" else None,
            bytes_each=dtype.itemsize,
            cache_each=cache_dtype(dtype, torch.device(device)).itemsize,
            packs_weights=packs_weights(torch.device(device), dtype),
            media_cache_bytes=0 if on_gpu else None,
            process_bytes=RESERVED_BYTES if on_gpu else PROCESS_BYTES,
        )
        place = device if on_gpu else role
        computed[place] = computed.get(place, 0) + memory.total
    return computed


def answer_rows(
    url: str,
    clips: Sequence[NamedClip],
    shares: Sequence[float],
    systems: Sequence[System],
    *,
    max_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each clip, share and system, target-only first; its answer is the baseline.

    The first answer about each clip, target-only, is preceded by a short one for warming up.
    """
    off = System(TARGET_ONLY, {"policy": "off"})
    others = [system for system in systems if system.name != TARGET_ONLY]
    with closing(Server(url, timeout_s=1800).connect()) as connection:
        for clip in clips:
            for system in (off, *others[:1]):
                _ask(connection, clip, LETTERS[0], system, _WARM_UP_TOKENS)
            for letter, share in zip(LETTERS, shares, strict=False):
                baseline = _ask(connection, clip, letter, off, max_tokens)
                yield _row(clip, share, off, baseline, baseline)
                for system in others:
                    answer = _ask(connection, clip, letter, system, max_tokens)
                    yield _row(clip, share, system, answer, baseline)


def _ask(
    connection: Connection, clip: NamedClip, letter: str, system: System, max_tokens: int
) -> Answer:
    question = question_about(f"What happens in the video? Answer {letter}", data_url(clip.data))
    further = {"ignore_eos": True, "mm_processor_kwargs": {"max_pixels": clip.max_pixels}}
    form = replace(FORM, max_tokens=max_tokens, further=further)
    return connection.ask(form.request(question, system.speculative).body())


def _row(
    clip: NamedClip, share: float, system: System, answer: Answer, baseline: Answer
) -> dict[str, Any]:
    figures = answer.figures
    return {
        "clip": clip.name,
        "prompt_tokens": answer.usage["prompt_tokens"],
        "share": share,
        "system": system.name,
        "num_tokens": answer.num_tokens,
        "acceptance_rate": figures["acceptance_rate"],
        "tokens_per_forward": figures["mean_tokens_per_forward"],
        "ttft_s": answer.ttft_s,
        "target_step_ms": figures["timings_ms"]["target_step"],
        "draft_step_ms": figures["timings_ms"]["draft_step"],
        "ms_per_token": 1e3 * answer.decode_s_per_token,
        "decode_speedup": baseline.decode_s / answer.decode_s,
        "end_to_end_speedup": baseline.end_to_end_s / answer.end_to_end_s,
        "is_equal": answer.token_ids == baseline.token_ids,
    }
