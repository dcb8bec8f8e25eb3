"""What an answer costs the target at best: ``python -m bench.load_bound``.

The device work of one answer of a load of many clients, measured alone on one core: its clip's
vision tower, its prompt, and its share of forwards over the blocks of several sequences. Beside
each the matrix products by themselves, over the same weights in the same order, and their
arithmetic a second: what no batching, scheduling or caching can take away. Answers a second are
at most a second over the sum.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.clips import held_out_clips
from bench.environment import describe_environment
from hippo.cli.stack import BUNDLED_PAIR
from hippo.config import load_settings, setting
from hippo.models.base import DecodedMedia, Prompt, SequenceRows, StepPlan
from hippo.models.family import CachedModel
from hippo.models.fused import FusedStack
from hippo.models.loading import load_model
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart
from hippo.video.frames import read_video
from hippo.video.limits import DecodeLimits
from hippo.video.sampling import resolve_plan

_LEAD = 32  # tokens of an answer before the rows that are timed


@dataclass(frozen=True, slots=True)
class LoadBoundSettings:
    """What an answer is made of."""

    model: str = setting(str(BUNDLED_PAIR / "target"), help="model folder or hub name")
    dtype: str = setting("float32", help="float32, bfloat16 or float16")
    num_sequences: int = setting(6, help="sequences that share a forward")
    rows_each: int = setting(16, help="rows of each of them")
    answer_rows: int = setting(128, help="rows that one answer takes in all, rejected ones too")
    repeats: int = setting(40, help="times that each figure is taken; the median counts")
    output: str = setting("bench/out/load_bound.json", help="where the figures go")


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes JSON."""
    settings = load_settings(
        LoadBoundSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.load_bound",
        description=__doc__ or "",
    )
    torch.set_num_threads(1)
    lines = measure(settings)
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": describe_environment(), "lines": lines}
    Path(settings.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console = Console(width=100)
    console.print(
        "| | rows | ms | products alone, ms | GFLOP/s of these |\n|---|---:|---:|---:|---:|"
    )
    for line in lines:
        *cells, rate = (
            f"{value:.1f}" if isinstance(value, float) else str(value) for value in line
        )
        cells.append(rate if line[-1] else "-")
        console.print(f"| {' | '.join(cells)} |")


def measure(settings: LoadBoundSettings) -> list[tuple[str, str | int, float, float, float]]:
    """A line for each part of an answer, and their sum: rows, milliseconds, milliseconds of the
    language model's products alone (of the tower: all of it), and their GFLOP/s."""
    model = load_model(
        settings.model,
        device="cpu",
        dtype=settings.dtype,
        num_slots=settings.num_sequences,
        max_context_length=4096,
    )
    assert isinstance(model, CachedModel)
    prompt = _short_prompt(model)
    repeats = settings.repeats
    visual = model.embed_visual(prompt)
    tower_ms = _median_ms(lambda: model.embed_visual(prompt), repeats)
    prefill_ms = _median_ms(lambda: list(model.prefill(0, prompt, visual, None)), repeats)
    answer = _answer(model, prompt, visual, _LEAD + settings.rows_each)
    for slot in range(settings.num_sequences):
        list(model.prefill(slot, prompt, visual, None))
        model.forward(StepPlan((SequenceRows(slot, 0, answer),)))
    plan = StepPlan(
        tuple(SequenceRows(slot, _LEAD, answer[_LEAD:]) for slot in range(settings.num_sequences))
    )
    forward_ms = _median_ms(lambda: model.forward(plan), repeats)
    num_rows = settings.num_sequences * settings.rows_each
    share = settings.answer_rows / num_rows
    num_layers = model.num_layers
    prompt_ms, prompt_rate = _products(model, prompt.length, num_layers, repeats)
    rows_ms, rows_rate = _products(model, num_rows, num_layers, repeats)
    layer_ms, layer_rate = _products(model, num_rows, 1, repeats)
    sum_ms = tower_ms + prefill_ms + share * forward_ms
    products_ms = tower_ms + prompt_ms + share * rows_ms
    return [
        (
            "vision tower",
            int(prompt.extras["pixel_values_videos"].shape[0]),
            tower_ms,
            tower_ms,
            0.0,
        ),
        ("prompt", prompt.length, prefill_ms, prompt_ms, prompt_rate),
        (f"forward of {settings.num_sequences}", num_rows, forward_ms, rows_ms, rows_rate),
        ("one layer over and over", num_rows, layer_ms, layer_ms, layer_rate),
        ("an answer", prompt.length + settings.answer_rows, sum_ms, products_ms, 0.0),
    ]


def _short_prompt(model: CachedModel) -> Prompt:
    limits = DecodeLimits()
    with tempfile.TemporaryDirectory() as folder:
        clip = held_out_clips(Path(folder), kind="short", num_clips=1)[0]
        with clip.path.open("rb", buffering=0) as file:
            frames = read_video(
                file,
                resolve_plan(FramePlan(), limits),
                limits,
                lambda count, height, width: torch.empty(
                    count, height, width, 3, dtype=torch.uint8
                ).numpy(),
            )
    media = DecodedMedia(
        MediaKind.VIDEO, torch.from_numpy(frames.pixels), frames.seconds, frames.sampled_fps
    )
    message = ChatMessage("user", (MediaPart(0), TextPart(clip.question)))
    return model.prepare([message], [media], FramePlan())


def _answer(
    model: CachedModel, prompt: Prompt, visual: torch.Tensor | None, num_tokens: int
) -> tuple[int, ...]:
    """Greedy tokens: what rows hold decides how fast some kernels are."""
    *_, logits = model.prefill(0, prompt, visual, None)
    assert logits is not None
    ids = [int(logits.argmax())]
    while len(ids) < num_tokens:
        step = StepPlan((SequenceRows(0, len(ids) - 1, (ids[-1],)),))
        ids.append(int(model.forward(step)[-1].argmax()))
    return tuple(ids)


def _products(
    model: CachedModel, num_rows: int, num_layers: int, repeats: int
) -> tuple[float, float]:
    """Milliseconds and GFLOP/s of the first layers' products with so many rows; those of one layer
    find their weights in the processor's cache."""
    stack = model._stack
    assert isinstance(stack, FusedStack)
    text = model.model.config.text_config
    hidden = torch.randn(num_rows, text.hidden_size, dtype=model.embedding.dtype)
    inner = torch.randn(num_rows, text.intermediate_size, dtype=model.embedding.dtype)

    @torch.inference_mode()
    def run() -> None:
        for layer in stack._layers[:num_layers]:
            layer._qkv(hidden)
            layer._output(hidden)
            layer._gate_up(hidden)
            layer._down(inner)

    took_ms = _median_ms(run, repeats)
    head_dim = text.hidden_size // text.num_attention_heads
    weights = text.hidden_size * (
        2 * text.hidden_size + 2 * text.num_key_value_heads * head_dim + 3 * text.intermediate_size
    )
    return took_ms, 2e-6 * num_rows * weights * num_layers / took_ms


def _median_ms(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
