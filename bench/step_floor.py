"""Steps against their floor, bytes over this device's bandwidth: ``python -m bench.step_floor``.

Bandwidth is that of reading as many bytes as a step does, over and over, by a sum: a model that
fits in a processor's cache has the cache's. The floor leaves out arithmetic and every call; what is
over it is the distance of the products from that bandwidth, and the operators between them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from bench.environment import describe_environment
from bench.step_time import random_clip
from hippo.config import load_settings, setting
from hippo.models.base import SequenceRows, StepPlan
from hippo.models.family import CachedModel
from hippo.models.loading import load_model
from hippo.models.placement import DTYPES
from hippo.models.plan import LoadPlan
from hippo.types import ChatMessage, FramePlan, MediaPart, TextPart

_ROUNDS = 9
_COLUMNS = (
    "model",
    "dtype",
    "rows",
    "step ms",
    "MB",
    "GB/s",
    "floor ms",
    "ratio",
    "µs a layer over it",
    "operators",
)


@dataclass(frozen=True, slots=True)
class StepFloorSettings:
    """What is measured."""

    models: tuple[str, ...] = setting(
        ("demo/models/target", "demo/models/draft"), help="model folders or hub names"
    )
    device: str = setting("cpu", help="cpu, cuda or cuda:N")
    dtypes: tuple[str, ...] = setting(("float32", "bfloat16", "float16"), help="each in turn")
    rows: tuple[str, ...] = setting(("1", "2", "4", "8", "16"), help="rows of a forward")
    exact_rows: int | None = setting(None, help="as the target's --deterministic-rows")
    threads: int = setting(1, help="CPU threads")
    seconds: float = setting(0.4, help="time spent on each figure")
    output: str = setting("bench/out/step_floor.json", help="where the figures go")


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes JSON."""
    settings = load_settings(
        StepFloorSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.step_floor",
        description=__doc__ or "",
    )
    torch.set_num_threads(settings.threads)
    steps = [
        step
        for model in settings.models
        for dtype in settings.dtypes
        for step in measure(model, dtype, settings)
    ]
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": describe_environment(), "steps": steps}
    Path(settings.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console = Console(width=100)
    console.print("| " + " | ".join(_COLUMNS) + " |\n|---|---|" + "---:|" * (len(_COLUMNS) - 2))
    for step in steps:
        console.print("| " + " | ".join(str(step[name]) for name in _COLUMNS) + " |")


def measure(name: str, dtype: str, settings: StepFloorSettings) -> list[dict[str, object]]:
    """A line for each number of rows."""
    model = load_model(
        LoadPlan(
            name,
            device=settings.device,
            dtype=dtype,
            max_context_length=4096,
            exact_rows=settings.exact_rows,
        )
    )
    prompt = model.prepare(
        [ChatMessage("user", (MediaPart(0), TextPart("What happens?")))],
        [random_clip(8, 112)],
        FramePlan(),
    )
    assert isinstance(model, CachedModel)
    list(model.prefill(0, prompt, model.embed_visual(prompt), None))
    lines = []
    for count in map(int, settings.rows):
        plan = StepPlan((SequenceRows(0, 0, tuple(range(1, count + 1))),))
        took_ms = _median_ms(partial(model.forward, plan), settings)
        with _Counter() as counter:
            model.forward(plan)
        num_bytes = _moved_bytes(model, prompt.length + count, count)
        bandwidth = _bandwidth(num_bytes, settings)
        floor_ms = num_bytes / bandwidth * 1e3
        values = (
            Path(name).name,
            dtype,
            count,
            round(took_ms, 3),
            round(num_bytes / 1e6, 1),
            round(bandwidth / 1e9, 1),
            round(floor_ms, 3),
            round(took_ms / floor_ms, 2),
            round((took_ms - floor_ms) / model.num_layers * 1e3, 1),
            counter.num_operators,
        )
        lines.append(dict(zip(_COLUMNS, values, strict=True)))
    return lines


def _moved_bytes(model: CachedModel, num_tokens: int, num_rows: int) -> int:
    """Weights, cached tokens read and written, logits."""
    text, cache, ids = model.model.config.text_config, model._cache, model.info.num_token_ids
    hidden, shape = text.hidden_size, cache.shape
    key_values = 2 * shape.num_kv_heads * shape.head_dim
    layer = hidden * (2 * hidden + key_values + 3 * text.intermediate_size)
    weights = (shape.num_layers * layer + ids * hidden) * DTYPES[model.info.dtype].itemsize
    cached = shape.num_layers * key_values * (num_tokens + num_rows) * cache.dtype.itemsize
    return int(weights + cached + num_rows * ids * 4)


def _bandwidth(num_bytes: int, settings: StepFloorSettings) -> float:
    """Bytes a second of a sum over so many."""
    data = torch.ones(num_bytes // 4, device=settings.device)
    return num_bytes / _median_ms(data.sum, settings) * 1e3


def _median_ms(action: Callable[[], object], settings: StepFloorSettings) -> float:
    def run(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            action()
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize(settings.device)
        return (time.perf_counter() - began) / repeats * 1e3

    run(2)
    repeats = max(1, int(settings.seconds * 1e3 / _ROUNDS / run(2)))
    return statistics.median(run(repeats) for _ in range(_ROUNDS))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that do more than look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_operators += not func.is_view
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(sys.argv[1:])
