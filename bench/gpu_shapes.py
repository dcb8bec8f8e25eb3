"""Step and prefill times of public models' shapes on one device: ``python -m bench.gpu_shapes``.

    python -m bench.gpu_shapes --models Qwen/Qwen2.5-VL-7B-Instruct,Qwen/Qwen2.5-VL-3B-Instruct
    python -m bench.gpu_shapes --models Qwen/Qwen2.5-VL-32B-Instruct --contexts 1024,25600
    python -m bench.gpu_shapes --device cpu --layers 1 --contexts 256 --rows 1,4

Weights are random, because times do not depend on them; nothing is downloaded. The measured code
is that of the services: fused layers, KV cache, chunked prefill. A step's floor is the time to read
the weights of layers and head and the cached keys and values once, at the bandwidth of a copy on
the device. ``--layers N`` keeps the first N layers (also of the vision tower) for a trial on a
small device; the table says so, and its times are those of the cut model.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.environment import ROOT, describe_environment
from bench.options import integers, names, parser_of
from hippo.cli.stack import BUNDLED_PAIR
from hippo.models._torchvision import ensure_torchvision
from hippo.models.base import Prompt, SequenceRows, StepPlan
from hippo.models.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.decoder import DecoderStack
from hippo.models.family import CachedModel
from hippo.models.linear import make_linear
from hippo.models.memory import available_bytes
from hippo.models.placement import DTYPES, parse_device
from hippo.models.pretrained import Pretrained
from hippo.models.qwen2_5_vl import QWEN2_5_VL
from hippo.public_models import PUBLIC_CONFIGS
from hippo.sizes import GIB, ModelShape, shape_of
from hippo.types import ModelInfo

_ROOM = 64  # free tokens after a context
_COPY_BYTES = {"cuda": 4 * GIB, "cpu": GIB // 4}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints tables and writes JSON."""
    args = _parse(argv)
    console = Console()
    device, dtype = parse_device(args.device), DTYPES[args.dtype]
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else copy_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks count as used memory
    document: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bytes_per_second": bandwidth,
        "models": [],
    }
    for name in args.models:
        config = small(configuration(name), args.layers)
        shape = shape_of(name, config)
        slot = shape.cache_bytes(max(args.contexts) + _ROOM, bytes_each=dtype.itemsize)
        work = shape.work_bytes(max(args.contexts), bytes_each=dtype.itemsize)
        needed = shape.num_parameters * dtype.itemsize + slot + work
        facts: dict[str, Any] = {"model": name, "layers": shape.num_layers, "needed_bytes": needed}
        document["models"].append(facts)
        if needed > available_bytes(device):
            facts["skipped"] = f"needs {needed / GIB:.1f} GiB"
            console.print(f"{name}: {facts['skipped']}, which {device} has not free: left out")
            continue
        model = random_model(
            name, config, device=device, dtype=dtype, context=max(args.contexts) + _ROOM
        )
        facts |= measure(model, shape, args.contexts, args.rows, bandwidth, seconds=args.seconds)
        _print(console, facts, is_cut=args.layers is not None)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def configuration(name: str) -> dict[str, Any]:
    """Returns the parts of a public model's config.json that set its sizes, or a folder's."""
    if name in PUBLIC_CONFIGS:
        public = PUBLIC_CONFIGS[name]
        text, vision = dict(public["text_config"]), dict(public["vision_config"])
        vision["out_hidden_size"] = text["hidden_size"]
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        quarter = 3 * half // 8
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half - 2 * quarter, quarter, quarter],
        }
        config = {"model_type": public["model_type"], "text_config": text, "vision_config": vision}
        config["tie_word_embeddings"] = text["tie_word_embeddings"]
    else:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen2_5_vl":
        raise SystemExit(f"{name} is a {config['model_type']}; this measures Qwen2.5-VL's shapes")
    return config


def small(config: Mapping[str, Any], num_layers: int | None) -> dict[str, Any]:
    """Returns the configuration with the first ``num_layers`` layers (None: all)."""
    text, vision = dict(config["text_config"]), dict(config["vision_config"])
    if num_layers is not None:
        text["num_hidden_layers"] = min(num_layers, text["num_hidden_layers"])
        vision["depth"] = min(num_layers, vision["depth"])
        text.pop("layer_types", None)
    return {**config, "text_config": text, "vision_config": vision}


def random_model(
    name: str,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
) -> CachedModel:
    """Returns the model with random weights and one slot of ``context`` tokens.

    It has the bundled pair's tokenizer, and logits for all ids of the configuration.
    """
    ensure_torchvision()
    from transformers import AutoProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    make: Any = Qwen2_5_VLForConditionalGeneration
    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    settings: Any = Qwen2_5_VLConfig(**kwargs)
    with torch.device(device):
        model = make._from_config(settings, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    text = model.config.text_config
    num_ids = int(text.vocab_size)
    with torch.inference_mode():
        stack = DecoderStack(model.model.language_model, model.lm_head, num_ids, make_linear)
    shape = CacheShape(
        num_layers=text.num_hidden_layers,
        num_slots=1,
        num_kv_heads=text.num_key_value_heads,
        capacity=context,
        head_dim=text.hidden_size // text.num_attention_heads,
    )
    cache = KeyValueCache(shape, dtype=cache_dtype(dtype, device), device=device)
    processor: Any = AutoProcessor.from_pretrained(BUNDLED_PAIR / "target")  # type: ignore[no-untyped-call]
    info = ModelInfo(
        name=name,
        family="qwen2_5_vl",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tokenizer_hash=b"",
        tokenizer_json=b"",
        num_token_ids=num_ids,
        end_token_ids=(),
        max_context_length=context,
        num_slots=1,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
    )
    pretrained = Pretrained(model, processor, stack, cache, info, make_linear, int)
    return CachedModel(pretrained, QWEN2_5_VL)


def measure(
    model: CachedModel,
    shape: ModelShape,
    contexts: Sequence[int],
    rows: Sequence[int],
    bandwidth: float,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Returns times of prefills and steps, and the floors of steps, in milliseconds."""
    device, cache = model.embedding.device, model._cache
    dtype_bytes = model.embedding.element_size()
    per_head = shape.hidden_size * model.info.num_token_ids
    layers = shape.num_shared_parameters + per_head  # read by every step
    prefills, steps = [], []
    for context in contexts:
        prompt = _prompt(context)

        def fill(prompt: Prompt = prompt) -> None:
            list(model.prefill(0, prompt, None, None))

        fill()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prefills.append({"tokens": context, "ms": timed(fill, device, seconds=0.0)})
        if device.type == "cuda":
            prefills[-1]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        num_cached = shape.cache_bytes(context, bytes_each=cache.dtype.itemsize)
        floor_ms = 1e3 * (layers * dtype_bytes + num_cached) / bandwidth
        for count in rows:
            plan = StepPlan((SequenceRows(0, 0, tuple(range(1, count + 1))),))

            def step(plan: StepPlan = plan) -> None:
                model.forward(plan)

            step()
            ms = timed(step, device, seconds=seconds)
            steps.append(
                {"context": context, "rows": count, "ms": ms, "floor_ms": floor_ms,
                 "over_floor": ms / floor_ms}
            )  # fmt: skip
    return {"dtype": model.info.dtype, "prefills": prefills, "steps": steps}


def timed(action: Callable[[], None], device: torch.device, *, seconds: float) -> float:
    """Returns the median milliseconds of synchronised calls over ``seconds``, at least one."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        _wait(device)
        began = time.perf_counter()
        action()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second that a large copy on the device reads and writes."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    goal.copy_(source)

    def copy() -> None:
        goal.copy_(source)

    ms = timed(copy, device, seconds=0.5)
    return 2 * source.nbytes / ms * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompt(length: int) -> Prompt:
    ids = torch.arange(length) % 500
    return Prompt(
        input_ids=ids,
        positions=torch.arange(length).expand(3, -1),
        next_position=length,
        visual_indices=torch.empty(0, dtype=torch.int64),
        visual_grids=(),
        question_indices=torch.empty(0, dtype=torch.int64),
        prompt_hash=hashlib.sha256(ids.numpy().tobytes()).digest(),
    )


def _print(console: Console, facts: Mapping[str, Any], *, is_cut: bool) -> None:
    cut = f", only {facts['layers']} layers" if is_cut else ""
    table = Table(title=f"{facts['model']}, {facts['dtype']}{cut}")
    for column in ("context", "rows", "step ms", "floor ms", "over floor"):
        table.add_column(column, justify="right")
    for prefill in facts["prefills"]:
        table.add_row(f"{prefill['tokens']}", "prefill", f"{prefill['ms']:.1f}", "", "")
    for step in facts["steps"]:
        table.add_row(
            str(step["context"]), str(step["rows"]), f"{step['ms']:.3f}",
            f"{step['floor_ms']:.3f}", f"{step['over_floor']:.2f}",
        )  # fmt: skip
    console.print(table)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.gpu_shapes", __doc__)
    add = parser.add_argument
    pair = [f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("7B", "3B")]
    add("--models", type=names, default=pair, help="public names, or folders with config.json")
    add("--device", default="cuda", help="cuda, cuda:N or cpu")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--layers", type=int, help="number of layers to keep")
    add("--contexts", type=integers, default=[1024, 8192, 25600], help="cached tokens")
    add("--rows", type=integers, default=[1, 2, 4, 8, 16], help="rows of a step")
    add("--seconds", type=float, default=1.0, help="time for each step")
    add("--bandwidth", type=float, help="GB per second; default: that of a measured copy")
    add("--threads", type=int, default=1, help="of a CPU")
    add("--out", type=Path, default=ROOT / "bench/out/gpu_shapes.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
