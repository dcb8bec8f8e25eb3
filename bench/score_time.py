"""Times the scores of visual tokens beside one decoder layer: ``python -m bench.score_time``.

The layer is a transformer decoder layer of random weights in plain PyTorch. It is measured on a
few rows in the middle of the prompt (which see half of it, as the average row does) and scaled to
all. The figures for a GPU are on paper: bytes moved and operations as implemented, and the
larger of the two times that they take at the given rates.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from bench.environment import describe_environment
from hippo.config import load_settings, setting
from hippo.pruning.scores import (
    VisualGrid,
    attention_scores,
    distinctness,
    spatial_distinctness,
    temporal_distinctness,
)
from hippo.pruning.select import VisualScores, needs_attention, select_tokens
from hippo.types import Pruning, PruningStrategy


@dataclass(frozen=True, slots=True)
class ScoreTimeSettings:
    """What is measured; the defaults are a prompt of 64 frames for a model of 7 billion."""

    frames: int = setting(64, help="frames of the video")
    rows: int = setting(20, help="rows of visual tokens in a frame")
    columns: int = setting(20, help="columns of visual tokens in a frame")
    queries: int = setting(32, help="text tokens whose attention is scored")
    crop: int = setting(5, help="window of the spatial score")
    hidden: int = setting(3584, help="width of the features and the layer")
    intermediate: int = setting(18944, help="width of the layer's MLP")
    heads: int = setting(28, help="attention heads")
    kv_heads: int = setting(4, help="key-value heads")
    head_dim: int = setting(128, help="width of a head")
    layers: int = setting(28, help="layers of the model, for the share of a whole prefill")
    layer_rows: int = setting(128, help="rows on which the layer is measured")
    device: str = setting("cpu", help="cpu, cuda or cuda:N")
    dtype: str = setting(
        "float32", help="of features, keys and layer", choices=("float32", "bfloat16")
    )
    threads: int = setting(1, help="CPU threads")
    rounds: int = setting(5, help="repetitions of each measurement")
    gpu_tflops: float = setting(790.0, help="GPU on paper: 10^12 bfloat16 operations a second")
    gpu_fp32_tflops: float = setting(60.0, help="GPU on paper: 10^12 float32 operations a second")
    gpu_tbytes: float = setting(4.8, help="GPU on paper: 10^12 bytes a second")
    output: str = setting("bench/out/pruning/score-time.json", help="where the figures go")

    @property
    def grid(self) -> VisualGrid:
        """The video's grid of visual tokens."""
        return self.frames, self.rows, self.columns

    @property
    def num_tokens(self) -> int:
        """Visual tokens."""
        return self.frames * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation takes on paper; two bytes an element where the model is bfloat16."""

    num_bytes: float
    num_operations: float
    is_float32: bool = True

    def gpu_ms(self, settings: ScoreTimeSettings) -> float:
        """The larger of the times for the bytes and for the operations."""
        tflops = settings.gpu_fp32_tflops if self.is_float32 else settings.gpu_tflops
        seconds = max(
            self.num_bytes / (settings.gpu_tbytes * 1e12), self.num_operations / (tflops * 1e12)
        )
        return seconds * 1e3


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes JSON."""
    settings = load_settings(
        ScoreTimeSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.score_time",
        description=__doc__ or "",
    )
    torch.set_num_threads(settings.threads)
    with torch.inference_mode():
        result = measure(settings)
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    document = {
        "experiment": "score-time",
        "command": " ".join(["python -m bench.score_time", *argv]),
        "environment": describe_environment(),
        "settings": asdict(settings),
        **result,
    }
    Path(settings.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _print(result, settings)


def measure(settings: ScoreTimeSettings) -> dict[str, object]:
    """Medians and the fastest of every score and of the layer, and their work on paper."""
    dtype = getattr(torch, settings.dtype)
    device = torch.device(settings.device)
    generator = torch.Generator().manual_seed(0)
    grids, num_tokens = (settings.grid,), settings.num_tokens

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    features = some(num_tokens, settings.hidden)
    query = some(settings.queries, settings.heads, settings.head_dim)
    key = some(settings.kv_heads, num_tokens, settings.head_dim)
    visual = torch.arange(num_tokens, device=device)
    scaling = settings.head_dim**-0.5
    scores = VisualScores(attention_scores(query, key, scaling=scaling, visual=visual), features)

    def strategy(name: str) -> Callable[[], object]:
        pruning = Pruning(PruningStrategy(name))
        return lambda: select_tokens(pruning, grids, num_tokens, scores)

    actions: dict[str, Callable[[], object]] = {
        "attention, one layer": lambda: attention_scores(
            query, key, scaling=scaling, visual=visual
        ),
        "temporal": lambda: temporal_distinctness(features, grids),
        "spatial": lambda: spatial_distinctness(features, grids, settings.crop),
        "temporal and spatial": lambda: distinctness(features, grids, crop=settings.crop),
    }
    for item in PruningStrategy:
        if needs_attention(item):
            actions[f"choice, {item.value}"] = strategy(item.value)
    work = _work_of_scores(settings)
    figures = [
        {
            "name": name,
            **_time(action, settings, device),
            **(_on_paper(work[name], settings) if name in work else {}),
        }
        for name, action in actions.items()
    ]
    layer = _time(_layer(settings, some), settings, device)
    factor = num_tokens / settings.layer_rows
    return {
        "settings": {name: getattr(settings, name) for name in ScoreTimeSettings.__slots__},
        "num_visual_tokens": num_tokens,
        "scores": figures,
        "layer": {
            "measured_rows": settings.layer_rows,
            **{name: round(value * factor, 3) for name, value in layer.items()},
            **_on_paper(_work_of_layer(settings), settings),
        },
    }


def _layer(settings: ScoreTimeSettings, some: Callable[..., torch.Tensor]) -> Callable[[], object]:
    """One decoder layer over ``layer_rows`` rows that see half of the prompt."""
    hidden, head_dim = settings.hidden, settings.head_dim
    heads, kv_heads = settings.heads, settings.kv_heads
    rows = settings.layer_rows
    scale = hidden**-0.5
    qkv = some((heads + 2 * kv_heads) * head_dim, hidden) * scale
    out = some(hidden, heads * head_dim) * scale
    gate_up = some(2 * settings.intermediate, hidden) * scale
    down = some(hidden, settings.intermediate) * settings.intermediate**-0.5
    key, value = some(2, kv_heads, 1, settings.num_tokens // 2, head_dim)
    hidden_rows = some(rows, hidden)

    def run() -> torch.Tensor:
        state = hidden_rows
        projected = linear(rms_norm(state, (hidden,)), qkv)
        query = projected[:, : heads * head_dim].view(rows, kv_heads, -1, head_dim)
        groups = query.shape[2]
        seen = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.expand(-1, groups, -1, -1),
            value.expand(-1, groups, -1, -1),
        )
        state = state + linear(seen.permute(2, 0, 1, 3).reshape(rows, -1), out)
        gate, up = linear(rms_norm(state, (hidden,)), gate_up).chunk(2, dim=-1)
        return state + linear(silu(gate) * up, down)

    return run


def _work_of_scores(settings: ScoreTimeSettings) -> dict[str, Work]:
    """As implemented: each elementwise step reads and writes its tensors in memory."""
    num_tokens, head_dim = settings.num_tokens, settings.head_dim
    keys = settings.kv_heads * num_tokens * head_dim
    logits = settings.heads * settings.queries * num_tokens
    attention = Work(
        # keys: gathered (2 + 2), to float32 (2 + 4), read (4); logits: written, softmax, summed
        num_bytes=14 * keys + 4 * logits * 4,
        num_operations=logits * (2 * head_dim + 5),
    )
    elements = num_tokens * settings.hidden
    # to float32 (2 + 4), length (4), division (4 + 4)
    unit = Work(num_bytes=18 * elements, num_operations=3 * elements)
    # a pair's product (8 + 4) and sum (4); half of the window's places are pairs
    num_pairs = (settings.crop**2 - 1) // 2
    temporal = Work(unit.num_bytes + 16 * elements, unit.num_operations + 2 * elements)
    spatial = Work(
        unit.num_bytes + 16 * num_pairs * elements, unit.num_operations + 2 * num_pairs * elements
    )
    return {
        "attention, one layer": attention,
        "temporal": temporal,
        "spatial": spatial,
        "temporal and spatial": Work(
            temporal.num_bytes + spatial.num_bytes - unit.num_bytes,
            temporal.num_operations + spatial.num_operations - unit.num_operations,
        ),
    }


def _work_of_layer(settings: ScoreTimeSettings) -> Work:
    num_tokens, hidden = settings.num_tokens, settings.hidden
    width = settings.heads * settings.head_dim
    kv_width = settings.kv_heads * settings.head_dim
    weights = hidden * (2 * width + 2 * kv_width + 3 * settings.intermediate)
    # Causal: the average row sees half of the tokens; two products an element.
    attention = 2 * num_tokens * num_tokens * width
    return Work(
        # weights once, the residual read and written twice, what stands between once each way
        num_bytes=2 * weights
        + 2 * num_tokens * (4 * hidden + 4 * (width + kv_width) + 6 * settings.intermediate),
        num_operations=2 * weights * num_tokens + attention,
        is_float32=False,
    )


def _on_paper(work: Work, settings: ScoreTimeSettings) -> dict[str, float]:
    return {
        "gpu_gbytes": round(work.num_bytes / 1e9, 3),
        "gpu_gflop": round(work.num_operations / 1e9, 3),
        "gpu_ms": round(work.gpu_ms(settings), 4),
    }


def _time(
    action: Callable[[], object], settings: ScoreTimeSettings, device: torch.device
) -> dict[str, float]:
    def run() -> float:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    run()
    times = [run() for _ in range(settings.rounds)]
    return {"median_ms": round(statistics.median(times), 3), "min_ms": round(min(times), 3)}


def _print(result: dict[str, object], settings: ScoreTimeSettings) -> None:
    layer, figures = result["layer"], result["scores"]
    assert isinstance(layer, dict) and isinstance(figures, list)
    frames, rows, columns = settings.grid
    table = Table(
        title=f"{settings.num_tokens} visual tokens ({frames} frames of {rows} x {columns}), "
        f"hidden {settings.hidden}, {settings.queries} queries; {settings.dtype} on "
        f"{settings.device}, {settings.threads} thread(s)",
        caption=f"layer: measured on {settings.layer_rows} rows that see half of the prompt, "
        f"times {settings.num_tokens / settings.layer_rows:g}; GPU: on paper, bfloat16, "
        f"{settings.gpu_tflops:g} TFLOP/s ({settings.gpu_fp32_tflops:g} in float32), "
        f"{settings.gpu_tbytes:g} TB/s",
    )
    for column in (
        "", "median ms", "fastest ms", "of a layer", "of the prefill", "GPU GB", "GPU GFLOP",
        "GPU ms", "of a layer",
    ):  # fmt: skip
        table.add_column(column, justify="left" if not column else "right")
    for row in (*figures, {"name": "one layer's prefill", **layer}):
        share = row["min_ms"] / layer["min_ms"]
        paper = ("", "", "", "")
        if "gpu_ms" in row:
            paper = (
                f"{row['gpu_gbytes']:.2f}",
                f"{row['gpu_gflop']:.1f}",
                f"{row['gpu_ms']:.2f}",
                f"{row['gpu_ms'] / layer['gpu_ms']:.1%}",
            )
        table.add_row(
            row["name"],
            f"{row['median_ms']:.1f}",
            f"{row['min_ms']:.1f}",
            f"{share:.2%}",
            f"{share / settings.layers:.3%}",
            *paper,
        )
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
