"""``hippo sizes``: computes the memory that a pair needs, and the devices that it fits on."""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import (
    CACHE_BYTES,
    DEVICE_BYTES,
    GIB,
    PROCESS_BYTES,
    RESERVED_BYTES,
    USED_SHARE,
    Memory,
    ModelShape,
    memory_of,
    most_slots,
)
from hippo.errors import InvalidRequestError
from hippo.lab.commands.options import check_range
from hippo.lab.simulation.hardware import helper_memory
from hippo.lab.simulation.pairs import KNOWN_PAIRS
from hippo.models.interface.context import pruned_cache_tokens

_MOST_DEVICES = 8

HELP = "work out the memory that a pair takes"
DESCRIPTION = "Works out the memory of weights and cache, and on which devices it fits."
EXAMPLES = """\
examples:
  hippo sizes --target Qwen/Qwen2.5-VL-32B-Instruct --draft Qwen/Qwen2.5-VL-7B-Instruct
  hippo sizes --target Qwen/Qwen2.5-VL-72B-Instruct --frames 128 --concurrency 8
  hippo sizes --target Qwen/Qwen2.5-VL-72B-Instruct-AWQ
  hippo sizes --target Qwen/Qwen2.5-VL-72B-Instruct --weights-bits 4.25     nf4
  hippo sizes --target /models/my-target --device-memory 24,48
  hippo sizes --target Qwen/Qwen2.5-VL-3B-Instruct --cpu  the memory of a CPU's services
  hippo sizes --all --markdown                            all known pairs, as a table

Nothing is loaded or downloaded: shapes come from a table of public configurations, or from the
config.json of a folder.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--target", metavar="MODEL", help="public name, or folder with config.json")
    models.add_argument("--all", action="store_true", help="the pairs of the table")
    add = parser.add_argument
    add("--draft", metavar="MODEL", help="public name or folder of the draft")
    add(
        "--weights-bits", type=float, metavar="BITS",
        help="of a weight in the target's layers if they are quantised, scales included: AWQ "
        "4.4, GPTQ 4.2, nf4 4.25, int8 and FP8 8 (default: 16, or by the model's name or files)",
    )  # fmt: skip
    add("--frames", type=int, default=64, help="of a video (default: %(default)s)")
    add(
        "--frame-size", metavar="WxH",
        help="pixels of a frame as the model sees it (default: 448x448; Qwen-VL only)",
    )  # fmt: skip
    add("--text-tokens", type=int, default=256, help="of the question (default: %(default)s)")
    add("--max-tokens", type=int, default=512, help="of the answer (default: %(default)s)")
    add("--concurrency", type=int, default=4, help="sequences at once (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device-memory", default=",".join(map(str, DEVICE_BYTES)), metavar="GB,...",
        help="devices by the size they are sold under (default: %(default)s)",
    )  # fmt: skip
    where.add_argument(
        "--cpu", action="store_true",
        help="of services on a CPU: counts also the packed copy of a tied head, frames of earlier "
        "media and the process; the cache is in float32, as on a processor without AMX",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="a table for a document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    check_range(arguments, 1, "weights_bits", most=16)
    check_range(arguments, 1, "concurrency", "frames", "text_tokens", "max_tokens")
    plan = _Plan(
        num_frames=arguments.frames,
        frame_size=_frame_size(arguments.frame_size),
        num_other_tokens=arguments.text_tokens + arguments.max_tokens,
        num_slots=arguments.concurrency,
        devices={} if arguments.cpu else _devices(arguments.device_memory),
        is_cpu=arguments.cpu,
        weights_bits=arguments.weights_bits,
    )
    if arguments.all and arguments.draft:
        raise InvalidRequestError("--all has its own drafts: leave --draft out")
    pairs: Sequence[tuple[str, str | None]] = (
        KNOWN_PAIRS if arguments.all else ((arguments.target, arguments.draft),)
    )
    rows = [
        _row(role, name, plan)
        for pair in pairs
        for role, name in zip(("target", "draft"), pair, strict=True)
        if name is not None
    ]
    if arguments.json:
        _print_json(rows, plan)
    elif arguments.markdown:
        Console(soft_wrap=True).print("\n".join(_markdown(rows, plan)), markup=False)
    else:
        _print_table(rows, plan)
    return 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """The workload to compute memory for."""

    num_frames: int
    frame_size: tuple[int, int] | None
    num_other_tokens: int
    num_slots: int
    devices: dict[int, int]  # bytes by the size in the name; none for a CPU
    is_cpu: bool
    weights_bits: float | None  # in the target's layers; None: 16, or by name or files

    @property
    def cache_each(self) -> int:
        """Bytes of a number in the cache."""
        return 4 if self.is_cpu else 2

    def memory_of(self, shape: ModelShape, num_tokens: int, cache_tokens: int) -> Memory:
        """Returns the memory of all slots on one device."""
        return memory_of(
            shape,
            num_tokens=num_tokens,
            num_slots=self.num_slots,
            cache_tokens=cache_tokens,
            cache_each=self.cache_each,
            packs_weights=self.is_cpu,
            media_cache_bytes=None if self.is_cpu else 0,
            process_bytes=PROCESS_BYTES if self.is_cpu else 0,
        )

    def num_tokens(self, shape: ModelShape) -> int:
        """Returns the tokens of prompt and answer, rounded up to a multiple of 256."""
        visual = shape.num_visual_tokens(self.num_frames, self.frame_size)
        return math.ceil((visual + self.num_other_tokens) / 256) * 256


@dataclass(frozen=True, slots=True)
class _Fit:
    """How a model fits on devices of one size; ``num_devices`` is 0 if it does not fit."""

    num_devices: int
    most_slots: int

    def __str__(self) -> str:
        return f"{self.num_devices} x, {self.most_slots} slots" if self.num_devices else "no"


@dataclass(frozen=True, slots=True)
class _Row:
    """One model of a pair."""

    role: str
    shape: ModelShape
    num_tokens: int
    cache_tokens: int  # in a slot
    whole: Memory  # on one device
    unpruned: Memory  # ``whole`` if slots cached the whole context
    fits: dict[int, _Fit]


def _row(role: str, name: str, plan: _Plan) -> _Row:
    shape = find_shape(name, layer_bits=plan.weights_bits if role == "target" else None)
    num_tokens = plan.num_tokens(shape)
    cache_tokens = pruned_cache_tokens(num_tokens) if role == "draft" else num_tokens
    counts = range(1, _MOST_DEVICES + 1) if role == "target" else (1,)

    slots_on = partial(most_slots, shape, num_tokens=num_tokens, cache_tokens=cache_tokens)

    def fit(device_bytes: int) -> _Fit:
        """The fewest devices that hold the model and all its slots."""
        for count in filter(shape.can_divide, counts):
            if (slots := slots_on(device_bytes, num_devices=count)) >= plan.num_slots:
                return _Fit(count, slots)
        return _Fit(0, 0)

    return _Row(
        role,
        shape,
        num_tokens,
        cache_tokens,
        plan.memory_of(shape, num_tokens, cache_tokens),
        plan.memory_of(shape, num_tokens, num_tokens),
        {size: fit(num_bytes) for size, num_bytes in plan.devices.items()},
    )


def _cells(row: _Row, plan: _Plan) -> dict[str, str]:
    """Returns the cells of a model's line by their headings."""
    whole, empty = row.whole, row.shape.cache_bytes(0, bytes_each=plan.cache_each)
    token_bytes = row.shape.cache_bytes(1, bytes_each=plan.cache_each) - empty
    return {
        "role": row.role,
        "model": row.shape.name,
        "weights, GiB": f"{whole.weights / GIB:.1f}",
        "cache per token, KiB": f"{token_bytes / 1024:.0f}",
        "context, tokens": f"{row.num_tokens:,}",
        "cached of it": f"{row.cache_tokens:,}",
        "work, GiB": f"{whole.work / GIB:.1f}",
        f"total for {plan.num_slots} slots, GiB": f"{whole.total / GIB:.1f}",
        **{f"{size} GB devices": str(fit) for size, fit in row.fits.items()},
    }


def _note(plan: _Plan) -> str:
    size = "448x448" if plan.frame_size is None else "{}x{}".format(*plan.frame_size)
    quantized = ""
    if plan.weights_bits is not None:
        quantized = f", the target's layers in {plan.weights_bits:g} bits a weight"
    workload = (
        f"bfloat16{quantized}; {plan.num_frames} frames (Qwen-VL: of {size}), "
        f"{plan.num_other_tokens} tokens of question and answer, "
        f"{plan.num_slots} sequences at once; "
    )
    if plan.is_cpu:
        return (
            f"{workload}on a CPU, with the packed copy of a tied head and the cache in float32; "
            f"the total includes {PROCESS_BYTES / 1e6:.0f} MB of Python's libraries and twice "
            f"{CACHE_BYTES // 1_000_000} MB (or one context) for features and frames of earlier "
            "media; a draft caches what a pruned prompt needs"
        )
    return (
        f"{workload}a draft caches what a pruned prompt needs; the devices that are needed also "
        f"have room for {1 - USED_SHARE:.0%} of what the weights leave free, "
        f"{CACHE_BYTES // 1_000_000} MB (or one context) for features of earlier media, "
        f"{RESERVED_BYTES // GIB} GiB of each device for the driver; "
        "N x: tensor parallel over N devices, the fewest that the model fits on"
    )


def _markdown(rows: Sequence[_Row], plan: _Plan) -> Iterator[str]:
    table = [_cells(row, plan) for row in rows]
    rule = "|" + "---|" * len(table[0])
    lines = (f"| {' | '.join(line)} |" for line in (table[0], *(row.values() for row in table)))
    yield from (next(lines), rule, *lines, f"\n({_note(plan)}.)")


def _print_table(rows: Sequence[_Row], plan: _Plan) -> None:
    console = Console()
    table = Table(caption=_note(plan), caption_justify="left")
    for heading in _cells(rows[0], plan):
        is_text = heading in ("role", "model")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row, plan).values())
    console.print(table)
    for line in (line for row in rows for line in _advice(row, plan)):
        console.print(line, highlight=False, soft_wrap=True)
    for size, helper in _helpers(rows, plan).items():
        layers = f"{helper['num_layers']} of {rows[0].shape.num_layers} layers"
        total = f"{helper['total_bytes'] / GIB:.1f} GiB"
        line = f"prefill helper, beside the draft on {size} GB: {layers}, {total}"
        console.print(line, highlight=False, soft_wrap=True)


def _advice(row: _Row, plan: _Plan) -> Iterator[str]:
    """Yields the flags for this workload, and what pruning saves."""
    loading = ""
    if not plan.is_cpu:
        loading = f"; loading needs {row.shape.host_bytes() / GIB + 4:.0f} GiB of the machine's"
        loading += " own memory for each device"
    yield (
        f"{row.role}, for hippo up: --{row.role}-arg=--slots={plan.num_slots} "
        f"--max-context-length {row.num_tokens}{loading}"
    )
    if row.shape.states is not None:
        states = row.shape.states.num_bytes(plan.cache_each)
        yield f"{row.role}: the states of a sequence take {states / GIB:.2f} GiB of the cache"
    if row.cache_tokens < row.num_tokens:
        saved = row.unpruned.cache - row.whole.cache
        yield (
            f"{row.role}: pruning saves {saved / GIB:.2f} GiB: the cache takes "
            f"{row.whole.cache / GIB:.2f} GiB, and for whole prompts "
            f"(--draft-arg=--cache-tokens={row.num_tokens}) {row.unpruned.cache / GIB:.2f} GiB"
        )
    if row.role == "target":
        num_visual = row.num_tokens - plan.num_other_tokens
        yield f"gateway, for hippo up: --gateway-arg=--max-visual-tokens={num_visual}"


def _helpers(rows: Sequence[_Row], plan: _Plan) -> dict[int, dict[str, int]]:
    """Returns the pair's prefill helpers by the device's size, where both models take one each."""
    target, draft = rows[0], rows[-1]
    return {
        size: helper_memory(target.shape, draft.whole, num_bytes, target.num_tokens)
        for size, num_bytes in plan.devices.items()
        if len(rows) == 2 and target.fits[size].num_devices == draft.fits[size].num_devices == 1
    }


def _print_json(rows: Sequence[_Row], plan: _Plan) -> None:
    """Prints the plan and the rows, all sizes in bytes."""
    content: dict[str, Any] = {
        "plan": dataclasses.asdict(plan),
        "models": [
            {
                "role": row.role,
                "model": row.shape.name,
                "num_parameters": row.shape.num_parameters,
                "max_context_length": row.num_tokens,
                "cache_tokens": row.cache_tokens,
                "weight_bytes": row.whole.weights,
                "work_bytes": row.whole.work,
                "cache_bytes": row.whole.cache,
                "unpruned_cache_bytes": row.unpruned.cache,
                "total_bytes": row.whole.total,
                "devices": {size: dataclasses.asdict(fit) for size, fit in row.fits.items()},
            }
            for row in rows
        ],
        "prefill_helpers": _helpers(rows, plan),
    }
    Console(soft_wrap=True).print_json(json.dumps(content))


def _frame_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise InvalidRequestError(f"--frame-size {text}: expected WIDTHxHEIGHT, as 448x448")
    return int(width), int(height)


def _devices(text: str) -> dict[int, int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise InvalidRequestError(f"--device-memory {text}: expected whole GB, as 40,80")
    # A device sold as N GB has about N GiB; DEVICE_BYTES has the exact sizes of common ones.
    return {int(size): DEVICE_BYTES.get(int(size), int(size) * GIB) for size in sizes}
