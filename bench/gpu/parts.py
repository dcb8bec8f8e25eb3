"""The parts of ``python -m bench.gpu``."""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.answers.systems import systems
from bench.base.clips import filmed_clip
from bench.base.report import Report
from bench.base.tables import wide_console
from bench.gpu.products import PRODUCT_COLUMNS, product_rows
from bench.gpu.steps import STEP_COLUMNS, copy_bandwidth, step_rows
from bench.shapes.random_pair import PairForm, write_pair
from bench.shapes.served import ANSWER_COLUMNS, NamedClip, answer_rows, watched_stack
from hippo.catalog.shapes import find_shape
from hippo.cli.stack import StackOptions
from hippo.models.loading.placement import parse_device

SHARES = (0.85, 0.93)
_SIZES = {"7b": "7B", "32b": "32B", "72b": "72B"}  # sizes of targets; the draft is always 3B
_FORMS = {"72b": "unsloth bnb-4bit"}  # target's form in tests.support.models.quantized
_NUM_SLOTS = 2
_COMPLETE = "complete"  # a file beside weights that were written to the end


class NotMeasuredError(Exception):
    """The time is up, or the device is of the wrong kind; the message says which."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    contexts: tuple[int, ...] = (1024, 8192, 25_600)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    product_rows: tuple[int, ...] = (1, 8, 11, 16, 32, 512)
    seconds_each: float = 0.3
    num_frames: tuple[int, ...] = (10, 84, 256)
    side: int = 392  # pixels of a clip's square frames: 196 visual tokens for each two frames
    max_tokens: int = 128
    systems: tuple[str, ...] = ("serial γ=5", "serial γ=10", "vpsd γ=5", "adaptive")


_SMALL = Scale(
    contexts=(64, 128), rows=(1, 3), seconds_each=0.0, num_frames=(4,), side=56, max_tokens=24,
    systems=("serial γ=5", "adaptive"),
)  # fmt: skip


@dataclass(slots=True)
class GpuRun:
    """One call of the command; the pairs that its parts wrote."""

    args: argparse.Namespace
    work: Path
    report: Report
    scale: Scale
    until_s: float = 0.0

    @property
    def dtype(self) -> str:
        """A CPU computes bfloat16 slowly."""
        return "float32" if self.args.device == "cpu" else "bfloat16"

    @property
    def devices(self) -> tuple[str, str]:
        """Devices of target and draft: two GPUs where there are two."""
        if self.args.device == "cpu":
            return "cpu", "cpu"
        return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"

    @property
    def step_kinds(self) -> tuple[bool, ...]:
        """Whether steps are captured as CUDA graphs: both, where that is possible."""
        if self.args.device == "cpu":
            return (False,)
        return {"eager": (False,), "graphs": (True,)}.get(self.args.steps, (False, True))

    def check_time(self, following: str) -> None:
        """Raises NotMeasuredError if nothing more may begin."""
        if time.monotonic() > self.until_s:
            raise NotMeasuredError(f"out of time before {following}")

    def write_pair(self, size: str, roles: Sequence[str] = ("target", "draft")) -> list[Path]:
        """Returns the folders of ``roles``, whose weights are written once in a run."""
        is_small = self.args.small
        folder = self.work / (f"small-{size}" if is_small else size)
        names = {
            "target": f"Qwen/Qwen2.5-VL-{_SIZES[size]}-Instruct",
            "draft": "Qwen/Qwen2.5-VL-3B-Instruct",
        }
        missing = [role for role in roles if not (folder / role / _COMPLETE).exists()]
        if missing:
            for other in _SIZES:
                if other != size and not is_small:
                    shutil.rmtree(self.work / other, ignore_errors=True)
            began_s = time.monotonic()
            form = PairForm(
                *(names["target"], names["draft"], SHARES),
                target_form=_FORMS.get(size),
                is_published_size=not is_small,
            )
            write_pair(folder, form, roles=missing)
            for role in missing:
                (folder / role / _COMPLETE).touch()
            shown = " and ".join(names[role] for role in missing)
            self.report.add_note(f"wrote {shown}, random, in {time.monotonic() - began_s:.0f} s")
        return [folder / role for role in roles]


def run_parts(args: argparse.Namespace) -> int:
    """Runs the parts one after the other; returns the exit code."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("no CUDA device is here; --device cpu --small is a trial without one\n")
        return 2
    console = wide_console()
    device = "cpu"
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        device = ", ".join(names)
    report = Report(args.out, "gpu", console=console, device=device, is_small=args.small)
    scale = _SMALL if args.small else Scale()
    scale = replace(
        scale,
        contexts=tuple(args.contexts or scale.contexts),
        num_frames=tuple(args.frames or scale.num_frames),
    )
    num_failed = 0
    kept = args.work / "hippo-gpu"
    if args.keep:
        kept.mkdir(parents=True, exist_ok=True)
    with (
        nullcontext(kept)
        if args.keep
        else tempfile.TemporaryDirectory(prefix="hippo-gpu-", dir=args.work)
    ) as work:
        run = GpuRun(args, Path(work), report, scale)
        for name in args.parts:
            size = name.partition("-")[2]
            report.begin_section(name)
            began_s = time.monotonic()
            run.until_s = began_s + args.seconds
            try:
                PARTS[name](run, size or "7b")
                report.add_note(f"complete after {time.monotonic() - began_s:.0f} s")
            except Exception as error:  # the other parts can still be measured
                num_failed += 1
                report.add_note(f"not complete: {type(error).__name__}: {error}")
                if not isinstance(error, NotMeasuredError):
                    console.print(traceback.format_exc(), markup=False)
    console.print(f"written to {args.out}/gpu.md and gpu.json")
    return 1 if num_failed else 0


def _measure_steps(run: GpuRun, size: str) -> None:
    """Steps and prefills of the target's shape, and with 7B also of the draft's."""
    folders = run.write_pair(size, ("target", "draft") if size == "7b" else ("target",))
    device = run.devices[0]
    bandwidth = copy_bandwidth(device)
    run.report.add_note(f"a copy on {device} reads and writes {bandwidth / 1e9:.0f} GB/s")
    run.report.begin_table("steps and prefills", STEP_COLUMNS)
    for name, folder in zip((_SIZES[size], "3B"), folders, strict=False):
        model = f"Qwen2.5-VL-{name}"
        for has_graphs in run.step_kinds:
            run.check_time(f"{model}, {'graphs' if has_graphs else 'eager'}")
            for row in step_rows(
                folder,
                device=device,
                dtype=run.dtype,
                has_graphs=has_graphs,
                contexts=run.scale.contexts,
                rows=run.scale.rows,
                seconds=run.scale.seconds_each,
                bandwidth=bandwidth,
            ):
                run.report.add_row({"model": model, **row})
                run.check_time(f"the figures after this one of {model}")


def _measure_products(run: GpuRun, size: str) -> None:
    """The products of a layer of 72B, in several forms."""
    device = parse_device(run.devices[0])
    if device.type != "cuda":
        raise NotMeasuredError("the kernels need a CUDA device")
    run.report.begin_table("products of a layer by form", PRODUCT_COLUMNS)
    shape = find_shape("Qwen/Qwen2.5-VL-72B-Instruct")
    for row in product_rows(shape, device=device, rows=run.scale.product_rows):
        run.report.add_row(row)
        run.check_time("the figures after this one")


def _serve(run: GpuRun, size: str) -> None:
    """Serves the pair and asks about clips of different lengths."""
    frames, side = run.scale.num_frames, run.scale.side
    num_tokens = max(frames) // 2 * (side // 28) ** 2 + run.scale.max_tokens + 512
    folders = run.write_pair(size)
    clips = [
        NamedClip(
            f"{count} frames of {side} x {side}",
            filmed_clip(count, width=side, height=side, num_frames=count, fps=2),
            side * side,
        )
        for count in frames
    ]
    chosen = [each for each in systems("holistic", 0.9) if each.name in run.scale.systems]
    for has_graphs in run.step_kinds:
        kind = "graphs" if has_graphs else "eager"
        run.check_time(kind)
        options = stack_options(folders, run.devices, run.dtype, num_tokens, has_graphs=has_graphs)
        with watched_stack(
            options, run.report, num_tokens=num_tokens, num_slots=_NUM_SLOTS
        ) as stack:
            run.report.begin_table(f"answers, {kind}", ANSWER_COLUMNS)
            for row in answer_rows(
                stack.url, clips, SHARES, chosen, max_tokens=run.scale.max_tokens
            ):
                run.report.add_row(row)
                run.check_time("the answers after this one")


def stack_options(
    folders: Sequence[Path],
    devices: tuple[str, str],
    dtype: str,
    num_tokens: int,
    *,
    has_graphs: bool,
) -> StackOptions:
    """Returns options for target and draft in ``folders`` with two slots each."""
    common: tuple[str, ...] = ("--slots", str(_NUM_SLOTS))
    common += ("--max-context-length", str(num_tokens))
    common += ("--cuda-graphs", "on" if has_graphs else "off")
    if devices == ("cpu", "cpu"):
        common += ("--num-threads", "1")
    return StackOptions(
        target_model=str(folders[0]),
        draft_model=str(folders[1]),
        target_device=devices[0],
        draft_device=devices[1],
        dtype=dtype,
        draft_dtype=dtype,
        port=0,
        target_args=common,
        draft_args=common,
    )


PARTS = {
    "steps": _measure_steps,
    "serve": _serve,
    "steps-32b": _measure_steps,
    "serve-32b": _serve,
    "products": _measure_products,
    "steps-72b": _measure_steps,
    "serve-72b": _serve,
}
