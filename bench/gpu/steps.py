"""Times of steps and prefills of one model on one device, and the floors of steps."""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import GIB, ModelShape
from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt, SequenceRows, StepPlan
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.placement import parse_device

STEP_COLUMNS = {
    "model": ("model", ""),
    "steps": ("steps", ""),
    "context": ("context", ",d"),
    "rows (-: prefill)": ("rows", "d"),
    "ms": ("ms", ".3f"),
    "host ms": ("host_ms", ".3f"),
    "kernels": ("num_kernels", "d"),
    "busy ms": ("busy_ms", ".3f"),
    "floor ms": ("floor_ms", ".3f"),
    "over the floor": ("over_floor", ".2f"),
}
_ROOM = 64  # free tokens behind a context
_COPY_BYTES = {"cuda": 4 * GIB, "cpu": GIB // 8}


def step_rows(
    folder: Path,
    *,
    device: str,
    dtype: str,
    has_graphs: bool,
    contexts: Sequence[int],
    rows: Sequence[int],
    seconds: float,
    bandwidth: float,
) -> Iterator[dict[str, Any]]:
    """Loads the model and yields the time of each prefill and step, in milliseconds.

    ``host_ms`` pass until the host has queued a step; if that is nearly ``ms``, the device waits
    for the host. ``num_kernels`` run for ``busy_ms`` in sum, as torch's profiler sees one call. A
    step's floor is the time to read the weights of
    layers and head and the cached keys and values once, at ``bandwidth`` bytes a second.
    ``seconds`` are spent on each figure.
    """
    plan = LoadPlan(
        str(folder),
        device=device,
        dtype=dtype,
        max_context_length=max(contexts) + _ROOM,
        cuda_graphs="on" if has_graphs else "off",
    )
    model = load_model(plan)
    assert isinstance(model, CachedModel)
    num_graphs = list(model.capture_steps())
    if has_graphs and not num_graphs:
        raise RuntimeError(f"no step of {folder} was captured as a CUDA graph")
    shape = find_shape(str(folder))
    kind = "graphs" if has_graphs else "eager"
    try:
        for context in contexts:
            yield from _rows_of(model, shape, context, rows, seconds, bandwidth, kind)
    finally:
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _rows_of(
    model: CachedModel,
    shape: ModelShape,
    context: int,
    rows: Sequence[int],
    seconds: float,
    bandwidth: float,
    kind: str,
) -> Iterator[dict[str, Any]]:
    device, bytes_each = model.embedding.device, model.embedding.element_size()
    prompt = _text_prompt(context)

    def fill() -> None:
        list(model.prefill(0, prompt, None, None))

    fill()
    facts = {"steps": kind, "context": context}
    timed = median_ms(fill, device, seconds=0.0)
    yield {
        **facts,
        "rows": None,
        **timed,
        **kernels_of(fill, device),
        "floor_ms": None,
        "over_floor": None,
    }
    num_bytes = shape.num_shared_parameters * (
        bytes_each if shape.layer_bits is None else shape.layer_bits / 8
    )
    num_bytes += shape.hidden_size * model.info.num_token_ids * bytes_each
    num_bytes += shape.cache_bytes(context, bytes_each=bytes_each)
    for count in rows:
        plan = StepPlan((SequenceRows(0, 0, tuple(range(1, count + 1))),))

        def step(plan: StepPlan = plan) -> None:
            model.forward(plan)

        step()
        timed = {**median_ms(step, device, seconds=seconds), **kernels_of(step, device)}
        floor_ms = 1e3 * num_bytes / bandwidth
        floor = {"floor_ms": floor_ms, "over_floor": timed["ms"] / floor_ms}
        yield {**facts, "rows": count, **timed, **floor}


def median_ms(
    action: Callable[[], object], device: torch.device, *, seconds: float
) -> dict[str, float]:
    """Returns the median milliseconds of calls over ``seconds``, at least one: ``ms`` until the
    device has finished, ``host_ms`` until the call returns."""
    times: list[float] = []
    host_times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        _synchronize(device)
        began = time.perf_counter()
        action()
        host_times.append(1e3 * (time.perf_counter() - began))
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times), "host_ms": statistics.median(host_times)}


def kernels_of(action: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Returns what torch's profiler sees of one call on a GPU; None for each figure on a CPU."""
    if device.type != "cuda":
        return {"num_kernels": None, "busy_ms": None}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        action()
        _synchronize(device)
    seen = [each for each in profiler.key_averages() if each.device_type == DeviceType.CUDA]
    return {
        "num_kernels": sum(event.count for event in seen),
        "busy_ms": sum(event.self_device_time_total for event in seen) / 1e3,
    }


def copy_bandwidth(name: str) -> float:
    """Returns the bytes per second that a large copy on the device reads and writes."""
    device = parse_device(name)
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)

    goal.copy_(source)
    ms = median_ms(lambda: goal.copy_(source), device, seconds=0.5)["ms"]
    num_bytes = 2 * source.nbytes
    source = goal = torch.empty(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks count as used memory
    return num_bytes / ms * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _text_prompt(length: int) -> Prompt:
    ids = torch.arange(length) % 200
    return Prompt(
        input_ids=ids,
        positions=torch.arange(length).expand(3, -1),
        next_position=length,
        visual_indices=torch.empty(0, dtype=torch.int64),
        visual_grids=(),
        question_indices=torch.empty(0, dtype=torch.int64),
        prompt_hash=hashlib.sha256(ids.numpy().tobytes()).digest(),
    )
