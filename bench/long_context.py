"""The bundled architecture at a long context: time along the answer, memory against the sum.

    python -m bench.long_context time       through draft, target and gateway, from a video file
    python -m bench.long_context memory     one model after the other in this process

The clip is written for the purpose (a moving pattern), is decoded, sampled and resized as any
other, and has 25,600 visual tokens by default: 128 frames of 560 x 560. The pair is the bundled
one (or, with --weights random, its shape) with the limit on a video's pixels lifted. Answers are
--tokens long whatever they say.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.client import Answer, converse, user_turn, video_url
from bench.environment import ROOT, describe_environment
from bench.long_clip import lift_limits, num_visual_tokens, write_clip
from bench.long_figures import draw, show, windows_of
from bench.long_memory import measure_memory
from bench.random_draft import write_random_draft
from bench.runs import running_stack
from hippo.cli.stack import BUNDLED_PAIR, StackOptions, default_cores

QUESTION = "What happens in this video?"
_ROOM = 512  # tokens of the question and the chat template, and a margin


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON (and, of times, a plot)."""
    args = _parse(argv)
    console = Console()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "environment": describe_environment(),
        "num_visual_tokens": num_visual_tokens(args.frames, args.size),
        "clip": {"frames": args.frames, "size": args.size},
        "weights": args.weights,
        "dtype": args.dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        pair = write_pair(Path(folder), args.weights)
        clip = write_clip(Path(folder) / "clip.mp4", num_frames=args.frames, size=args.size)
        context = num_visual_tokens(args.frames, args.size) + args.tokens + _ROOM
        if args.what == "time":
            answers = measure_time(pair, clip, context, args)
            document["answers"] = answers
            windows = {
                name: [windows_of(one["verdicts"], width=args.window) for one in runs]
                for name, runs in answers.items()
            }
            document["windows"] = {
                name: [asdict(one) for one in runs] for name, runs in windows.items()
            }
            show(console, answers, windows)
            if args.plot is not None:
                draw(windows, args.plot)
        else:
            document["memory"] = measure_memory(
                pair,
                clip,
                QUESTION,
                context=context,
                dtype=args.dtype,
                num_tokens=args.tokens,
                ratio=args.ratio,
            )
            console.print_json(json.dumps(document["memory"]))
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {args.out}")


def write_pair(folder: Path, weights: str) -> dict[str, Path]:
    """Checkpoints of the bundled architecture that take a long video."""
    pair = {}
    for seed, role in enumerate(("target", "draft")):
        goal = folder / role
        if weights == "random":
            write_random_draft(BUNDLED_PAIR / role, goal, seed=seed)
        else:
            goal.mkdir()
            for file in (BUNDLED_PAIR / role).iterdir():
                (goal / file.name).write_bytes(file.read_bytes())
        lift_limits(goal)
        pair[role] = goal
    return pair


def measure_time(
    pair: dict[str, Path], clip: Path, context: int, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Answers of both systems in turn; the first question reads the clip, later ones reuse that."""
    target_core, draft_core = default_cores("cpu", "cpu")
    limits = ("--slots", "1", "--max-context-length", str(context))
    options = StackOptions(
        target_model=str(pair["target"]),
        draft_model=str(pair["draft"]),
        dtype=args.dtype,
        draft_dtype=args.dtype,  # as its memory is computed
        target_core=target_core,
        draft_core=draft_core,
        port=0,
        waits_for_code=True,
        target_args=(*limits, "--decode-seconds", "120"),
        draft_args=(*limits, "--decode-seconds", "120"),
        gateway_args=("--request-timeout-s", "1800"),
    )
    if draft_core is not None:
        os.sched_setaffinity(0, {draft_core})
    systems: dict[str, dict[str, Any]] = {
        "target-only": {"policy": "off"},
        "adaptive": {
            "policy": "adaptive",
            "pruning": {"strategy": "holistic", "ratio": args.ratio},
        },
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ("first", *systems)}
    video = video_url(clip)
    with running_stack(options) as url, httpx.Client(base_url=url, timeout=1800) as client:

        def run(name: str, speculative: dict[str, Any], num_tokens: int) -> dict[str, Any]:
            answer = converse(
                client,
                [user_turn(video, QUESTION)],
                speculative=speculative,
                max_tokens=num_tokens,
                has_timeline=True,
                ignores_end=True,
                cache_salt="long",  # later questions go on from what the first one cached
            )
            return _facts(answer)

        answers["first"].append(run("first", systems["adaptive"], 8))
        for _ in range(args.rounds):
            for name, speculative in systems.items():
                answers[name].append(run(name, speculative, args.tokens))
    return answers


def _facts(answer: Answer) -> dict[str, Any]:
    figures = answer.figures
    return {
        "num_tokens": answer.num_tokens,
        "token_ids": answer.token_ids,
        "ttft_s": answer.ttft_s,
        "decode_s": answer.decode_s,
        "ms_per_token": 1e3 * answer.decode_s / max(1, answer.num_tokens - 1),
        "verdicts": figures["timeline_ms"]["verdicts"],
        "figures": {key: value for key, value in figures.items() if key != "timeline_ms"},
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.long_context",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=("time", "memory"))
    add("--frames", type=int, default=128, help="of the clip, at two a second")
    add("--size", type=int, default=560, help="height and width of a frame in pixels")
    add("--tokens", type=int, default=512, help="of an answer")
    add("--window", type=int, default=64, help="tokens of a window")
    add("--rounds", type=int, default=2, help="answers of each system")
    add("--ratio", type=float, default=0.9, help="share of the visual tokens the draft drops")
    add("--dtype", default="float32", help="float32, bfloat16 or float16")
    add("--weights", default="bundled", choices=("bundled", "random"))
    add("--plot", type=Path, help="an SVG of the windows")
    add("--out", type=Path, default=ROOT / "bench/out/long_context.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
