"""The parts of ``python -m bench.gpu``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.answers.runs import run_systems, running_stack
from bench.answers.systems import TARGET_ONLY, System, systems
from bench.base.cells import LATENCY_COLUMNS, latency_rows
from bench.base.clips import filmed_clip, held_out_clips
from bench.base.environment import ROOT
from bench.base.report import Report, Section
from bench.base.tables import wide_console
from bench.gpu.products import PRODUCT_COLUMNS, product_cells, product_rows
from bench.gpu.steps import STEP_COLUMNS, copy_bandwidth, step_cells, step_rows
from bench.shapes.random_pair import PairForm, write_pair
from bench.shapes.served import ANSWER_COLUMNS, NamedClip, answer_cells, answer_rows, watched_stack
from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import GIB, RESERVED_BYTES, memory_of
from hippo.cli.stack import BUNDLED_PAIR, StackOptions
from hippo.models.loading.memory import available_bytes
from hippo.models.loading.placement import parse_device

SHARES = (0.85, 0.93)
_SIZES = {"7b": ("7B", "3B"), "32b": ("32B", "3B"), "72b": ("72B", "3B")}
_FORMS = {"72b": "unsloth bnb-4bit"}  # of a target, see tests.support.models.quantized
_BITS = {"72b": 4.13}  # of a weight in its files
_LARGEST = "Qwen/Qwen2.5-VL-72B-Instruct"
_FORM_LAYERS = 8  # of 72B's 80
_STORED_FORMS = (  # with the form of the files, and the quantisation while they are loaded
    ("plain", None, None),
    ("nf4", None, "nf4"),
    ("int8", None, "int8"),
    ("FP8", "RedHatAI FP8-dynamic", None),
)
_SIDE = 392  # pixels of a clip's square frames: 196 visual tokens for each two frames
_NUM_SLOTS = 2
_COMPLETE = "complete"  # a file beside weights that were written to the end
_SKIPPED_WITHOUT_CUDA = "skipif(" + "not torch.cuda.is_available()"


class NotMeasuredError(Exception):
    """The time is up, or memory or disk space is too small; the message says which."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    contexts: tuple[int, ...] = (1024, 8192, 25_600)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    product_rows: tuple[int, ...] = (1, 8, 11, 16, 32, 512)
    seconds_each: float = 0.3
    num_frames: tuple[int, ...] = (10, 84, 256)
    side: int = _SIDE
    max_tokens: int = 128
    num_clips: int = 4
    systems: tuple[str, ...] = ("serial γ=5", "serial γ=10", "vpsd γ=5", "adaptive")
    test_files: tuple[str, ...] | None = None  # all


_SMALL = Scale(
    contexts=(64, 128), rows=(1, 3), seconds_each=0.0, num_frames=(4,), side=56, max_tokens=24,
    num_clips=1,
    systems=("serial γ=5", "adaptive"),
    test_files=("tests/integration/models/test_gpu.py",),
)  # fmt: skip


@dataclass(slots=True)
class GpuRun:
    """One call of the command; the pairs that its parts wrote."""

    args: argparse.Namespace
    work: Path
    until_s: float = 0.0
    scale: Scale = field(default_factory=Scale)

    @property
    def dtype(self) -> str:
        """A CPU computes bfloat16 slowly."""
        return "float32" if self.args.device == "cpu" else "bfloat16"

    @property
    def placements(self) -> list[tuple[str, str]]:
        """Devices of target and draft: one for both, and two if there are two."""
        if self.args.device == "cpu":
            return [("cpu", "cpu")]
        several = torch.cuda.device_count() > 1
        return [("cuda:0", "cuda:0"), *([("cuda:0", "cuda:1")] if several else [])]

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

    def write_pair(
        self, size: str, section: Section, roles: Sequence[str] = ("target", "draft")
    ) -> tuple[Path, Path]:
        """Returns the folders of target and draft; those of ``roles`` have weights, which are
        written once in a run."""
        folder = self.work / (f"small-{size}" if self.args.small else size)
        names = {
            role: f"Qwen/Qwen2.5-VL-{each}-Instruct"
            for role, each in zip(("target", "draft"), _SIZES[size], strict=True)
        }
        missing = [role for role in roles if not (folder / role / _COMPLETE).exists()]
        if missing:
            is_small = self.args.small
            for other in _SIZES:
                if other != size and not is_small:
                    shutil.rmtree(self.work / other, ignore_errors=True)
            bits = {"target": _BITS.get(size)}
            num_bytes = sum(
                find_shape(names[role], layer_bits=bits.get(role)).weight_bytes()
                for role in missing
            )
            free = shutil.disk_usage(self.work).free
            if not is_small and num_bytes > free:
                raise NotMeasuredError(
                    f"{self.work} has {free / 1e9:.0f} GB free and the weights take "
                    f"{num_bytes / 1e9:.0f} GB: choose another folder with --work"
                )
            began = time.monotonic()
            form = PairForm(
                names["target"],
                names["draft"],
                SHARES,
                target_form=_FORMS.get(size),
                is_published_size=not is_small,
            )
            write_pair(folder, form, roles=missing)
            for role in missing:
                (folder / role / _COMPLETE).touch()
            took_s = time.monotonic() - began
            shown = " and ".join(names[role] for role in missing)
            section.add_note(f"wrote {shown}, random, in {took_s:.0f} s")
        return folder / "target", folder / "draft"


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
    num_failed = 0
    kept = args.work / "hippo-gpu"
    if args.keep:
        kept.mkdir(parents=True, exist_ok=True)
    with (
        nullcontext(kept)
        if args.keep
        else tempfile.TemporaryDirectory(prefix="hippo-gpu-", dir=args.work)
    ) as work:
        scale = _SMALL if args.small else Scale()
        scale = replace(
            scale,
            contexts=tuple(args.contexts or scale.contexts),
            num_frames=tuple(args.frames or scale.num_frames),
        )
        run = GpuRun(args, Path(work), scale=scale)
        for name in args.parts:
            part, _, size = name.partition("-")
            section = report.begin_section(name)
            began_s = time.monotonic()
            run.until_s = began_s + args.seconds
            try:
                _PARTS[part](run, section, size or "7b")
                section.add_note(f"complete after {time.monotonic() - began_s:.0f} s")
            except Exception as error:  # the other parts can still be measured
                num_failed += 1
                section.add_note(f"not complete: {type(error).__name__}: {error}")
                if not isinstance(error, NotMeasuredError):
                    console.print(traceback.format_exc(), markup=False)
    console.print(f"written to {args.out}/gpu.md and gpu.json")
    return 1 if num_failed else 0


def cuda_test_files() -> list[str]:
    """Returns the test files with tests that are skipped without a CUDA device; a conftest.py with
    such parameters stands for its folder."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if _SKIPPED_WITHOUT_CUDA in path.read_text(encoding="utf-8"):
            found.append(str(path.parent if path.name == "conftest.py" else path))
    return found


def _run_tests(run: GpuRun, section: Section, size: str) -> None:
    """Runs the files of tests that need a CUDA device; none of these may be skipped on one."""
    results = run.work / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = run.scale.test_files or cuda_test_files()
    subprocess.run(
        [*command, f"--junitxml={results}", *files],
        cwd=ROOT,
        timeout=max(run.until_s - time.monotonic(), 1.0),
        check=False,
    )
    table = section.add_table("tests that did not pass", ("test", "outcome", "message"))
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        result = next((each for each in case if each.tag != "properties"), None)
        outcome = "passed" if result is None else result.tag
        outcomes[outcome] += 1
        if result is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            message = (result.get("message") or "").partition("\n")[0]
            table.add_row([name, outcome, message], {"test": name, "outcome": outcome})
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    section.add_note(f"{len(files)} files: {counts}")
    allowed = {"passed", "skipped"} if run.args.device == "cpu" else {"passed"}
    if not outcomes or set(outcomes) - allowed:
        raise RuntimeError("a test failed or was skipped, or none was found")


def _measure_bundled(run: GpuRun, section: Section, size: str) -> None:
    """Compares policies with target-only, as ``python -m bench`` does."""
    console = wide_console()
    clips = held_out_clips(run.work / "clips", kind="short", num_clips=run.scale.num_clips)
    for target_device, draft_device in run.placements:
        for dtype in dict.fromkeys(("float32", run.dtype)):
            for has_graphs in run.step_kinds if dtype != "float32" else (False,):
                where = f"target on {target_device}, draft on {draft_device}"
                title = f"{dtype}, {where}, {'graphs' if has_graphs else 'eager'}"
                run.check_time(title)
                options = _stack_options(
                    (BUNDLED_PAIR / "target", BUNDLED_PAIR / "draft"),
                    (target_device, draft_device),
                    dtype,
                    4096,
                    has_graphs=has_graphs,
                )
                with running_stack(options) as stack:
                    chosen = _systems(run, "none", 0.0)
                    _, result = run_systems(console, stack.url, clips, chosen, title=title)
                table = section.add_table(title, LATENCY_COLUMNS)
                rows = latency_rows(result["summary"])
                for cells, row in zip(rows, result["summary"], strict=True):
                    table.add_row(cells, row)


def _measure_steps(run: GpuRun, section: Section, size: str) -> None:
    roles = ("target", "draft") if size == "7b" else ("target",)
    folders = run.write_pair(size, section, roles)[: len(roles)]
    names = [f"Qwen2.5-VL-{each}" for each in _SIZES[size]][: len(roles)]
    add_steps = _step_table(run, section, "steps and prefills")
    for name, folder in zip(names, folders, strict=True):
        _check_room(run, [folder], [run.placements[0][0]], max(run.scale.contexts), 1)
        add_steps(name, folder, run.scale.contexts, None)


def _step_table(
    run: GpuRun, section: Section, title: str
) -> Callable[[str, Path, Sequence[int], str | None], None]:
    """Adds a table; returns what adds the rows of a model by name, folder, contexts and
    quantisation at load."""
    device = run.placements[0][0]
    bandwidth = copy_bandwidth(device)
    section.add_note(f"a copy on {device} reads and writes {bandwidth / 1e9:.0f} GB/s")
    table = section.add_table(title, STEP_COLUMNS)

    def add(name: str, folder: Path, contexts: Sequence[int], quantization: str | None) -> None:
        for has_graphs in run.step_kinds:
            run.check_time(f"{name}, {'graphs' if has_graphs else 'eager'}")
            for row in step_rows(
                folder,
                device=device,
                dtype=run.dtype,
                quantization=quantization,
                has_graphs=has_graphs,
                contexts=contexts,
                rows=run.scale.rows,
                seconds=run.scale.seconds_each,
                bandwidth=bandwidth,
            ):
                table.add_row(step_cells(name, row), {"model": name, **row})
                run.check_time(f"the figures after this one of {name}")

    return add


def _measure_products(run: GpuRun, section: Section, size: str) -> None:
    """The products of a layer of 72B, in several forms."""
    device = parse_device(run.placements[0][0])
    if device.type != "cuda":
        raise NotMeasuredError("the kernels need a CUDA device")
    table = section.add_table("products of a layer by form", PRODUCT_COLUMNS)
    rows = run.scale.product_rows
    for row in product_rows(find_shape(_LARGEST), device=device, rows=rows):
        table.add_row(product_cells(row), row)
        run.check_time("the figures after this one")


def _measure_forms(run: GpuRun, section: Section, size: str) -> None:
    """Steps of 72B's shape with few layers, plain and in forms whose layers stay quantised."""
    section.add_note(f"{_FORM_LAYERS} layers of 80")
    add_steps = _step_table(run, section, "steps and prefills by form")
    folder: Path | None = None
    for label, form, quantization in _STORED_FORMS:
        if folder is None or form is not None:
            run.check_time(label)
            if folder is not None:
                shutil.rmtree(folder)
            pair_form = PairForm(
                _LARGEST,
                _LARGEST,
                SHARES,
                target_form=form,
                target_layers=2 if run.args.small else _FORM_LAYERS,
                is_published_size=not run.args.small,
            )
            folder, _ = write_pair(run.work / "forms", pair_form, roles=("target",))
        add_steps(label, folder, run.scale.contexts[:1], quantization)


def _serve(run: GpuRun, section: Section, size: str) -> None:
    """Serves the pair and asks about clips of different lengths; two GPUs where there are two."""
    frames, side = run.scale.num_frames, run.scale.side
    num_tokens = max(frames) // 2 * (side // 28) ** 2 + run.scale.max_tokens + 512
    devices = run.placements[-1]
    folders = run.write_pair(size, section)
    _check_room(run, folders, devices, num_tokens, _NUM_SLOTS)
    clips = [
        NamedClip(
            f"{count} frames of {side} x {side}",
            filmed_clip(count, width=side, height=side, num_frames=count, fps=2),
            side * side,
        )
        for count in frames
    ]
    for has_graphs in run.step_kinds:
        kind = "graphs" if has_graphs else "eager"
        run.check_time(kind)
        options = _stack_options(folders, devices, run.dtype, num_tokens, has_graphs=has_graphs)
        table = section.add_table(f"answers, {kind}", ANSWER_COLUMNS)
        with watched_stack(options, section, num_tokens=num_tokens, num_slots=_NUM_SLOTS) as (
            stack,
            _,
        ):
            chosen = _systems(run, "holistic", 0.9)
            for row in answer_rows(
                stack.url, clips, SHARES, chosen, max_tokens=run.scale.max_tokens
            ):
                table.add_row(answer_cells(row), row)
                run.check_time("the answers after this one")


def _check_room(
    run: GpuRun, folders: Sequence[Path], devices: Sequence[str], num_tokens: int, num_slots: int
) -> None:
    """Raises NotMeasuredError if the models do not fit on their devices."""
    needed: Counter[str] = Counter()
    for folder, device in zip(folders, devices, strict=True):
        shape = find_shape(str(folder))
        needed[device] += RESERVED_BYTES
        needed[device] += memory_of(shape, num_tokens=num_tokens, num_slots=num_slots).total
    for device, num_bytes in needed.items():
        free = available_bytes(parse_device(device))
        if not run.args.small and num_bytes > free:
            raise NotMeasuredError(
                f"needs {num_bytes / GIB:.1f} GiB of {device}, which has {free / GIB:.1f} GiB free"
            )


def _stack_options(
    folders: Sequence[Path],
    devices: tuple[str, str],
    dtype: str,
    num_tokens: int,
    *,
    has_graphs: bool,
) -> StackOptions:
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


def _systems(run: GpuRun, strategy: str, ratio: float) -> list[System]:
    chosen = run.scale.systems
    return [system for system in systems(strategy, ratio) if system.name in (TARGET_ONLY, *chosen)]


_PARTS: dict[str, Any] = {
    "tests": _run_tests,
    "bundled": _measure_bundled,
    "steps": _measure_steps,
    "forms": _measure_forms,
    "products": _measure_products,
    "serve": _serve,
}
