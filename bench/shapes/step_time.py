"""Measures a model's prefill, and its steps against a floor: ``python -m bench.shapes.step_time``.

The floor of a step is the time to move its bytes (weights, cached tokens, logits) at the device's
bandwidth, measured by a sum over the same number of bytes; it is the cache's bandwidth if a model
fits into a processor's cache. The floor contains no arithmetic and no call overhead.
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
from rich.table import Table

from bench.base.environment import describe_environment
from hippo.base.config import load_settings, setting
from hippo.models.cached import CachedModel
from hippo.models.interface.base import DecodedMedia, SequenceRows, StepPlan
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.placement import DTYPES
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

_ROUNDS = 15
_COLUMNS = ("rows", "median ms", "fastest ms", "MB", "GB/s", "floor ms", "over the floor")


@dataclass(frozen=True, slots=True)
class StepTimeSettings:
    """The settings of the measurement."""

    model: str = setting("demo/models/target", help="model folder or Hugging Face name")
    device: str = setting("cpu", help="cpu, cuda or cuda:N")
    dtype: str = setting("auto", help="float32, bfloat16, float16 or auto")
    rows: tuple[str, ...] = setting(("1", "2", "4", "8", "16"), help="rows of a forward")
    exact_rows: int | None = setting(None, help="as the target's --deterministic-rows")
    frames: int = setting(8, help="frames of the random clip in the prompt")
    size: int = setting(112, help="height and width of a frame in pixels")
    threads: int = setting(1, help="CPU threads")
    seconds: float = setting(1.0, help="time spent on each figure")
    output: str = setting("bench/out/step_time.json", help="where the figures go")


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes JSON."""
    settings = load_settings(
        StepTimeSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.shapes.step_time",
        description=__doc__ or "",
    )
    torch.set_num_threads(settings.threads)
    result = measure(settings)
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": describe_environment(), "model": settings.model, **result}
    Path(settings.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    title = (
        f"{result['dtype']} on {settings.device}, {result['prompt_tokens']} prompt tokens: vision "
        f"tower {result['vision_tower_ms']} ms, prefill {result['prefill_ms']} ms"
    )
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for step in result["steps"]:
        table.add_row(*(str(step[name]) for name in _COLUMNS))
    Console(width=120).print(table)


def measure(settings: StepTimeSettings) -> dict[str, Any]:
    """Returns times of vision tower and prefill, and a line for each number of rows."""
    plan = LoadPlan(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_context_length=8192,
        exact_rows=settings.exact_rows,
    )
    model = load_model(plan)
    assert isinstance(model, CachedModel)
    prompt = model.prepare_prompt(
        [ChatMessage("user", (MediaPart(0), TextPart("What happens?")))],
        [random_clip(settings.frames, settings.size)],
        FramePlan(),
    )
    vision = _rounds_ms(lambda: model.embed_visual(prompt), settings)
    visual = model.embed_visual(prompt)
    prefill = _rounds_ms(lambda: list(model.prefill(0, prompt, visual, None)), settings)
    return {
        "dtype": model.info.dtype,
        "num_parameters": model.info.num_parameters,
        "prompt_tokens": prompt.length,
        "vision_tower_ms": round(statistics.median(vision), 2),
        "prefill_ms": round(statistics.median(prefill), 2),
        "steps": [
            _step(model, prompt.length, count, settings) for count in map(int, settings.rows)
        ],
    }


def random_clip(num_frames: int, size: int) -> DecodedMedia:
    """Returns square frames of noise, two per second."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_frames, size, size, 3)
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    seconds = tuple(i / 2 for i in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, frames, seconds, 2.0)


def _step(
    model: CachedModel, num_cached: int, num_rows: int, settings: StepTimeSettings
) -> dict[str, object]:
    plan = StepPlan((SequenceRows(0, 0, tuple(range(1, num_rows + 1))),))
    rounds = _rounds_ms(partial(model.forward, plan), settings)
    num_bytes = _moved_bytes(model, num_cached + num_rows, num_rows)
    data = torch.ones(num_bytes // 4, device=settings.device)
    floor_ms = statistics.median(_rounds_ms(data.sum, settings))
    median_ms = statistics.median(rounds)
    values = (
        num_rows,
        round(median_ms, 3),
        round(min(rounds), 3),
        round(num_bytes / 1e6, 1),
        round(num_bytes / floor_ms / 1e6, 1),
        round(floor_ms, 3),
        round(median_ms / floor_ms, 2),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _moved_bytes(model: CachedModel, num_tokens: int, num_rows: int) -> int:
    """Returns the bytes of weights, of cached tokens read and written, and of logits."""
    text, cache, ids = model.model.config.text_config, model._cache, model.info.num_token_ids
    hidden, shape = text.hidden_size, cache.shape
    key_values = 2 * shape.num_kv_heads * shape.head_dim
    layer = hidden * (2 * hidden + key_values + 3 * text.intermediate_size)
    weights = (shape.num_layers * layer + ids * hidden) * DTYPES[model.info.dtype].itemsize
    cached = shape.num_layers * key_values * (num_tokens + num_rows) * cache.dtype.itemsize
    return int(weights + cached + num_rows * ids * 4)


def _rounds_ms(action: Callable[[], object], settings: StepTimeSettings) -> list[float]:
    """Returns milliseconds per call of ``_ROUNDS`` rounds of repeated calls, after a warm-up."""

    def run(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            action()
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize(settings.device)
        return (time.perf_counter() - began) / repeats * 1e3

    run(2)
    repeats = max(1, int(settings.seconds * 1e3 / _ROUNDS / max(run(2), 1e-3)))
    return [run(repeats) for _ in range(_ROUNDS)]


if __name__ == "__main__":
    main(sys.argv[1:])
