"""Times one model's forward by number of rows, and its prefill: ``python -m bench.step_time``."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.environment import describe_environment
from hippo.config import load_settings, setting
from hippo.models.base import DecodedMedia, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class StepTimeSettings:
    """What is measured."""

    model: str = setting(help="model folder or Hugging Face name")
    device: str = setting("cpu", help="cpu, cuda or cuda:N")
    dtype: str = setting("auto", help="float32, bfloat16 or auto")
    rows: tuple[str, ...] = setting(("1", "2", "4", "8", "16"), help="rows of a forward")
    frames: int = setting(8, help="frames of the random clip in the prompt")
    size: int = setting(112, help="height and width of a frame in pixels")
    threads: int = setting(1, help="CPU threads")
    seconds: float = setting(1.0, help="time spent on each number of rows")
    output: str = setting("bench/out/step_time.json", help="where the figures go")


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes JSON."""
    settings = load_settings(
        StepTimeSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.step_time",
        description=__doc__ or "",
    )
    torch.set_num_threads(settings.threads)
    model = load_model(
        LoadPlan(
            settings.model, device=settings.device, dtype=settings.dtype, max_context_length=8192
        )
    )
    result = measure(model, settings)
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": describe_environment(), "model": settings.model, **result}
    Path(settings.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _print(result)


def measure(model: VideoLanguageModel, settings: StepTimeSettings) -> dict[str, object]:
    """Medians and the fastest of every figure, in milliseconds."""
    prompt = model.prepare(
        [ChatMessage("user", (MediaPart(0), TextPart("What happens?")))],
        [random_clip(settings.frames, settings.size)],
        FramePlan(),
    )
    vision = _time(lambda: model.embed_visual(prompt), settings.seconds, model)
    visual = model.embed_visual(prompt)
    prefill = _time(lambda: list(model.prefill(0, prompt, visual, None)), settings.seconds, model)
    steps = []
    for count in map(int, settings.rows):
        plan = StepPlan((SequenceRows(0, 0, tuple(range(1, count + 1))),))
        action = functools.partial(model.forward, plan)
        steps.append({"rows": count, **_time(action, settings.seconds, model)})
    return {
        "dtype": model.info.dtype,
        "device": model.info.device,
        "num_parameters": model.info.num_parameters,
        "prompt_tokens": prompt.length,
        "visual_tokens": int(prompt.visual_indices.shape[0]),
        "vision_tower": vision,
        "prefill": prefill,
        "steps": steps,
    }


def random_clip(num_frames: int, size: int) -> DecodedMedia:
    """Frames of noise, square, two a second."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(
        0, 256, (num_frames, size, size, 3), dtype=torch.uint8, generator=generator
    )
    seconds = tuple(i / 2 for i in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, frames, seconds, 2.0)


def _time(
    action: Callable[[], object], seconds: float, model: VideoLanguageModel
) -> dict[str, float]:
    """Rounds of repeated calls; a round's figure is its mean, so that timers cost nothing."""
    is_cuda = model.info.device.startswith("cuda")

    def run(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        if is_cuda:
            torch.cuda.synchronize(model.info.device)
        return (time.perf_counter() - start) / repeats * 1e3

    run(2)
    repeats = max(1, int(seconds * 1e3 / _ROUNDS / max(run(2), 1e-3)))
    rounds = [run(repeats) for _ in range(_ROUNDS)]
    return {"median_ms": round(statistics.median(rounds), 4), "min_ms": round(min(rounds), 4)}


def _print(result: dict[str, object]) -> None:
    table = Table(
        title=f"{result['dtype']} on {result['device']}, {result['prompt_tokens']} prompt tokens"
    )
    for column in ("step", "median ms", "fastest ms", "over 1 row"):
        table.add_column(column, justify="right")
    steps = result["steps"]
    assert isinstance(steps, list)
    for name in ("vision_tower", "prefill"):
        figures = result[name]
        assert isinstance(figures, dict)
        table.add_row(name, f"{figures['median_ms']:.2f}", f"{figures['min_ms']:.2f}", "")
    for step in steps:
        table.add_row(
            f"{step['rows']} rows",
            f"{step['median_ms']:.3f}",
            f"{step['min_ms']:.3f}",
            f"{step['min_ms'] / steps[0]['min_ms']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
