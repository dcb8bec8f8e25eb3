"""Splits the time of a round on both cores into its parts: ``python -m bench.shapes.round_time``.

Each clip is asked about under each policy. Linux counts for every thread of the three processes
and of this client how long it ran, and how long it was ready while another thread had its core;
only the time from the first piece of text to the last counts. The verdicts tell the device
thread's time in forwards, between forwards, and waiting for the draft. The time in which it neither
ran, nor was ready, nor waited for the draft is time waiting for the interpreter lock. The rest of
the decode time is transport.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.answers.client import Answer, ask, video_url
from bench.answers.runs import bundled_pair, running_stack
from bench.answers.systems import System, policy_of, systems
from bench.base.clips import ClipFile, held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.cli.stack import Stack

_MS = 1e6
_THREADS = ("device", "loop", "transport")

Times = dict[tuple[str, str], tuple[int, int]]
"""Nanoseconds running and ready, by process and kind of thread."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table per policy and writes JSON."""
    args = _parse(argv)
    asked = set(args.systems.split(","))
    chosen = [
        each
        for each in systems(*(("holistic", 0.9) if args.kind == "long" else ("none", 0.0)))
        if asked & {each.name.replace(" ", ""), policy_of(each.name).name}
    ]
    if not chosen:
        raise SystemExit(f"--systems {args.systems}: no such policy, such as serial or serialγ=7")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder) / "clips", kind=args.kind, num_clips=args.num_clips)
        draft = find_draft(args.draft_model, Path(folder), args.kind)
        with running_stack(replace(bundled_pair(args.dtype), draft_model=draft)) as stack:
            rounds = measure(stack, clips, chosen, num_repeats=args.repeats)
    for each in rounds:
        console.print(table(each))
    result = new_result("bench.shapes.round_time", argv, dtype=args.dtype, systems=rounds)
    write_result(args.out, result)
    console.print(f"written to {args.out}")


def measure(
    stack: Stack, clips: Sequence[ClipFile], chosen: Sequence[System], *, num_repeats: int
) -> list[dict[str, Any]]:
    """Returns the mean round of each system over its answers, after one warm-up answer."""
    pids = {name: stack.child(name).pid for name in ("draft", "target", "gateway")}
    pids["client"] = os.getpid()
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    with httpx.Client(base_url=stack.url, timeout=600, trust_env=False) as client:
        for system in chosen:
            ask(client, video_url(clips[0].path), clips[0].question, speculative=system.speculative)
        for clip in [clip for _ in range(num_repeats) for clip in clips]:
            for system in chosen:
                marks: list[Times] = []
                answer = ask(
                    client,
                    video_url(clip.path),
                    clip.question,
                    speculative=system.speculative,
                    is_video_first=clip.is_video_first,
                    has_timeline=True,
                    on_edge=lambda marks=marks: marks.append(thread_times(pids)),  # type: ignore[misc]
                )
                sums[system.name].update(answer_times(answer, marks[0], marks[-1]))
    return [breakdown(system.name, sums[system.name]) for system in chosen]


def thread_times(pids: Mapping[str, int]) -> Times:
    """Returns how long the threads of the processes have run and been ready so far."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                comm = (task / "comm").read_text().strip()
                ran, ready, _ = map(int, (task / "schedstat").read_text().split())
            except OSError:  # the thread has ended
                continue
            kind = (
                "device" if comm == "device" else "loop" if task.name == str(pid) else "transport"
            )
            before = found.get((name, kind), (0, 0))
            found[name, kind] = (before[0] + ran, before[1] + ready)
    return found


def answer_times(answer: Answer, begin: Times, end: Times) -> Counter[str]:
    """Returns the parts of one answer's decode time in milliseconds."""
    times: Counter[str] = Counter()
    for (process, kind), (ran, ready) in end.items():
        ran_before, ready_before = begin.get((process, kind), (0, 0))
        times[f"{process} {kind} ran"] = (ran - ran_before) / _MS  # type: ignore[assignment]
        times[f"{process} {kind} ready"] = (ready - ready_before) / _MS  # type: ignore[assignment]
    figures = answer.figures
    verdicts = figures["timeline_ms"]["verdicts"][1:]
    for key in ("forward", "wait", "between"):
        times[key] = sum(verdict[key] for verdict in verdicts)
    times["decode"] = figures["timings_ms"]["decode"]
    times["rounds"] = len(verdicts)
    times["tokens"] = answer.num_tokens - 1
    times["blocks"] = figures["num_blocks"]
    return times


def breakdown(system: str, sums: Mapping[str, float]) -> dict[str, Any]:
    """Returns the mean milliseconds of a round; ``sums`` adds up ``answer_times``."""
    rounds = sums["rounds"]

    def a_round(key: str) -> float:
        return sums.get(key, 0.0) / rounds

    ran, ready = a_round("target device ran"), a_round("target device ready")
    busy = a_round("forward") + a_round("between")
    target = {
        "forward": a_round("forward"),
        "between forwards": a_round("between"),
        "waits for the draft": a_round("wait"),
        "transport": a_round("decode") - busy - a_round("wait"),
    }
    device = {
        "the device thread ran": ran,
        "was ready, others had the core": ready,
        "waited for the interpreter lock": max(busy - ran - ready, 0.0),
    }
    cores = {
        core: {
            f"{process} {kind}": a_round(f"{process} {kind} ran")
            for process in processes
            for kind in _THREADS
            if a_round(f"{process} {kind} ran")
        }
        for core, processes in (("target", ("target",)), ("draft", ("draft", "gateway", "client")))
    }
    for times in cores.values():
        times["idle"] = max(a_round("decode") - sum(times.values()), 0.0)
    return {
        "system": system,
        "num_rounds": rounds,
        "tokens_per_round": a_round("tokens"),
        "blocks_per_round": a_round("blocks"),
        "round_ms": a_round("decode"),
        "ms_per_token": sums["decode"] / sums["tokens"],
        "target": target,
        "device_thread": device,
        "cores": cores,
    }


def table(result: Mapping[str, Any]) -> Table:
    """Returns a table of one policy's round in milliseconds and shares."""
    shown = Table(
        title=f"{result['system']}: a round of {result['round_ms']:.2f} ms, "
        f"{result['tokens_per_round']:.1f} tokens and {result['blocks_per_round']:.1f} blocks",
        title_justify="left",
    )
    for column in ("", "what", "ms a round", "share"):
        shown.add_column(column, justify="left" if column in ("", "what") else "right")
    parts = (
        ("target's device", result["target"]),
        ("of forwards and between", result["device_thread"]),
        ("target's core", result["cores"]["target"]),
        ("draft's core", result["cores"]["draft"]),
    )
    for title, times in parts:
        for place, (what, value) in enumerate(times.items()):
            share = f"{value / result['round_ms']:.1%}"
            shown.add_row("" if place else title, what, f"{value:.3f}", share)
        shown.add_section()
    return shown


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.shapes.round_time", __doc__)
    add = parser.add_argument
    add(
        "--systems",
        default="target-only,vpsdγ=7,alwaysoptimistic,adaptive",
        help="policies; without γ at all block lengths (default: %(default)s)",
    )
    add("--dtype", default="float32")
    add("--draft-model", default=BUNDLED, help=HELP)
    add("--kind", choices=("short", "long"), default="short", help="of prompts")
    add("--num-clips", type=int, default=5, help="held-out clips")
    add("--repeats", type=int, default=2, help="times that each is asked about")
    add_out(parser, "round_time.json")
    args = parser.parse_args(argv)
    return args


if __name__ == "__main__":
    main()
