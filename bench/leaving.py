"""How long a client that goes away holds its slots.

    python -m bench.leaving                                     60 clients that leave
    python -m bench.leaving --publish bench/out/leaving.json    writes docs/reliability.md

Each client asks the bundled pair about a clip and leaves at a random moment: before the first
token, or after some pieces of the stream. Measured is the time from there until draft and target
say that no slot is in use. Looking takes some of it; how long a look takes is measured first.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.client import user_turn, video_url
from bench.clips import held_out_clips
from bench.environment import ROOT, describe_environment
from bench.load_figures import parse_samples
from bench.load_stack import LoadStack, load_stack
from bench.publish import environment_line
from bench.runs import bundled_pair
from bench.sections import replace_section

PAGE = ROOT / "docs/reliability.md"
_CHAT = "/v1/chat/completions"
_EARLY, _MIDWAY = "before the first token", "in mid-answer"
_POLL_S = 0.002
_NUM_LOOKS = 20


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a line a kind of moment and writes JSON; or publishes what was measured."""
    args = _parse(argv)
    if args.publish:
        result = json.loads(args.publish.read_text(encoding="utf-8"))
        replace_section(PAGE, "leaving", section(result))
        return
    given = argv if argv is not None else sys.argv[1:]
    with (
        tempfile.TemporaryDirectory() as folder,
        load_stack(bundled_pair("float32"), num_slots=1) as stack,
    ):
        (clip,) = held_out_clips(Path(folder), kind="short", num_clips=1)
        result = {
            "command": f"python -m bench.leaving {shlex.join(given)}".strip(),
            "environment": describe_environment(),
            "num_clients": args.num_clients,
            "seed": args.seed,
            "look_s": [_look_s(stack) for _ in range(_NUM_LOOKS)],
            "held_s": measure(stack, clip.path, args.num_clients, random.Random(args.seed)),
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console = Console(width=100)
    for moment, held_s in result["held_s"].items():
        median_ms, most_ms = _milliseconds(held_s)
        console.print(
            f"{moment}: {len(held_s)} clients, ms until both slots are free: "
            f"median {median_ms:.1f}, most {most_ms:.1f}"
        )
    console.print(f"written to {args.out}")


def measure(
    stack: LoadStack, clip: Path, num_clients: int, randomness: random.Random
) -> dict[str, list[float]]:
    """Seconds that slots were held by clients that had left, by when they left."""
    held_s: dict[str, list[float]] = {_EARLY: [], _MIDWAY: []}
    with httpx.Client(timeout=60, trust_env=False) as client:
        for index in range(num_clients):
            moment = list(held_s)[index % 2]
            body = {
                "model": "hippo",
                "messages": [user_turn(video_url(clip), "Describe the video.")],
                "max_tokens": 2000,
                "ignore_eos": True,
                "stream": moment == _MIDWAY,  # else nothing comes before the end
                "temperature": 0,
                "cache_salt": str(index),
                "speculative": {"policy": "optimistic"},
            }
            if moment == _MIDWAY:
                _leave_midway(client, stack.url, body, after=randomness.randrange(4, 100))
            else:  # while its video is read, or its prompt is prefilled
                _leave_early(client, stack.url, body, after_s=randomness.uniform(0.02, 0.2))
            left_s = time.perf_counter()
            while _is_used(stack):
                time.sleep(_POLL_S)
            held_s[moment].append(time.perf_counter() - left_s)
    return held_s


def section(result: Mapping[str, Any]) -> str:
    """A table with a line a kind of moment."""
    look_ms, _ = _milliseconds(result["look_s"])
    lines = [
        f"`{result['command']}`: {environment_line(result['environment'])}",
        "",
        "| the client left | clients | both slots free after, ms: median | most |",
        "|---|---:|---:|---:|",
    ]
    for moment, held_s in result["held_s"].items():
        median_ms, most_ms = _milliseconds(held_s)
        lines.append(f"| {moment} | {len(held_s)} | {median_ms:.1f} | {most_ms:.1f} |")
    lines += ["", f"A look at the metrics of both services takes {look_ms:.1f} ms in the median."]
    return "\n".join(lines)


def _leave_midway(client: httpx.Client, url: str, body: Mapping[str, Any], *, after: int) -> None:
    """Closes the connection after so many lines of the stream."""
    with client.stream("POST", url + _CHAT, json=body) as response:
        lines = response.iter_lines()
        for _ in range(after):
            next(lines)


def _leave_early(
    client: httpx.Client, url: str, body: Mapping[str, Any], *, after_s: float
) -> None:
    """Closes the connection when nothing has come for so long."""
    try:
        client.post(url + _CHAT, json=body, timeout=httpx.Timeout(60, read=after_s))
    except httpx.ReadTimeout:
        return
    raise RuntimeError(f"the answer was there within {after_s:.2f} s")


def _is_used(stack: LoadStack) -> bool:
    """Whether a service has a slot in use; the draft is looked at when the target has none."""
    return any(
        parse_samples(stack.metrics_of(name))["hippo_slots_used"] for name in ("target", "draft")
    )


def _look_s(stack: LoadStack) -> float:
    """Seconds that it takes to see that no slot is in use."""
    began_s = time.perf_counter()
    if _is_used(stack):
        raise RuntimeError("a slot is in use before the first client")
    return time.perf_counter() - began_s


def _milliseconds(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the largest."""
    return 1e3 * statistics.median(seconds), 1e3 * max(seconds)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.leaving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num-clients", type=int, default=60, help="at least 2")
    add("--seed", type=int, default=0, help="of the moments at which they leave")
    add("--out", type=Path, default=ROOT / "bench/out/leaving.json")
    add("--publish", type=Path, metavar="FILE", help="write docs/reliability.md from this")
    args = parser.parse_args(argv)
    if args.num_clients < 2:
        parser.error("--num-clients must be at least 2: one of each kind")
    return args


if __name__ == "__main__":
    main()
