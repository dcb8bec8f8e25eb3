"""Measures the figures of the model card: `python -m demo.evaluate --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from demo.figures import ATTRIBUTES, Agreement, Score, Tally, content_mask
from demo.training.batches import IntArray
from demo.training.export import MODELS
from demo.training.inference import Asked, Loaded, greedy, greedy_along, load
from demo.world import clips, texts
from demo.world.clips import Clip

ABOUT = """\
Measures the bundled pair on held-out clips (rendered, encoded to H.264 and decoded again):

  target     are the target's greedy statements right, and are they wrong for another clip?
  questions  are its short answers right?
  pair       how often do draft and target choose the same next token along the target's answers,
             with all visual tokens, a tenth or none; for content words and template words
  speed      one decode step of each model through transformers' own forward with a cache

Each prints a table and, with --json FILE, writes the figures.
"""
REPORTED = ("count", "colour", "shape", "direction", "event")


@dataclass(frozen=True, slots=True)
class Group:
    """Held-out clips of one size, with their sampled frames."""

    clips: list[Clip]
    frames: np.ndarray[Any, np.dtype[np.uint8]]  # [batch, num_frames, height, width, 3]


def held_out_groups(
    kind: clips.Kind, count: int, seed: int, most_tokens: int = 9000
) -> list[Group]:
    """Returns `count` held-out clips with sampled frames, in batches of equal size."""
    by_size: dict[tuple[int, ...], list[tuple[Clip, Any]]] = defaultdict(list)
    for index in tqdm(range(count), desc="clips"):
        clip = clips.held_out(kind, index, seed=seed)
        frames = clips.through_codec(clip)
        by_size[frames.shape].append((clip, frames))
    groups = []
    for members in by_size.values():
        most = max(2, most_tokens // (members[0][0].size.num_visual + 150))
        for start in range(0, len(members), most):
            part = members[start : start + most]
            groups.append(
                Group([clip for clip, _ in part], np.stack([frames for _, frames in part]))
            )
    return groups


def descriptions_of(
    target: Loaded, groups: Sequence[Group], *, is_video_first: bool
) -> list[list[list[int]]]:
    """Returns the target's greedy long descriptions, as ids for each clip of each group."""
    question = texts.DETAILED[0]
    return [
        greedy(
            target,
            Asked(group.frames, [question] * len(group.clips)),
            is_video_first=is_video_first,
        )
        for group in tqdm(groups, desc="target")
    ]


def measure_target(
    target: Loaded, groups: Sequence[Group], answers: list[list[list[int]]]
) -> dict[str, Any]:
    """Scores the target's statements against the facts of their clip and of five others."""
    own, swapped, exact = Score(), Score(), Tally()
    scenes, said = [], []
    for group, ids in zip(groups, answers, strict=True):
        for clip, answer in zip(group.clips, ids, strict=True):
            text = str(target.tokenizer.decode(answer))
            scenes.append(clip.scene)
            said.append(texts.parse(text))
            exact.add_case(text == texts.detailed(clip.scene))
    for index, scene in enumerate(scenes):
        own.add_clip(said[index], texts.facts(scene))
        for shift in range(1, min(6, len(scenes))):
            swapped.add_clip(said[(index + shift) % len(scenes)], texts.facts(scene))
    rows = {}
    for name in ATTRIBUTES:
        rows[name] = {
            "statements": own.strict.get(name, Tally()).total,
            "right": round(own.strict.get(name, Tally()).percent, 2),
            "right_swapped": round(
                (swapped.strict if name == "position" else swapped.placed)
                .get(name, Tally())
                .percent,
                2,
            ),
            "majority": round(own.majority(name), 2),
            **(_balanced(own, swapped, name) if name in REPORTED else {}),
        }
    lengths = [len(answer) for ids in answers for answer in ids]
    return {
        "clips": len(scenes),
        "attributes": rows,
        "facts_said": round(own.recall.percent, 2),
        "whole_answer_right": round(exact.percent, 2),
        "mean_answer_tokens": round(float(np.mean(lengths)), 1),
    }


def _balanced(own: Score, swapped: Score, name: str) -> dict[str, float]:
    return {
        "balanced": round(own.balanced(name), 2),
        "balanced_swapped": round(swapped.balanced(name), 2),
        "balanced_guess": round(swapped.balanced_guess(name), 2),
    }


def measure_questions(target: Loaded, groups: Sequence[Group], seed: int) -> dict[str, Any]:
    """Returns the share of right short answers by kind of question."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for group in tqdm(groups, desc="questions"):
        asked: dict[tuple[str, int], list[tuple[int, texts.Exchange]]] = defaultdict(list)
        for index, clip in enumerate(group.clips):
            rng = np.random.default_rng((clips.HELD_OUT, seed, index))
            for exchange in texts.short_questions(clip.scene, rng, 7):
                asked[exchange.kind, len(target.encoder.text_ids(exchange.question))].append(
                    (index, exchange)
                )
        for (kind, _), members in asked.items():
            batch = Asked(
                group.frames[[index for index, _ in members]],
                [exchange.question for _, exchange in members],
            )
            for answer, (_, exchange) in zip(
                greedy(target, batch, max_new_tokens=40), members, strict=True
            ):
                tallies[kind].add_case(str(target.tokenizer.decode(answer)) == exchange.answer)
    return {
        kind: {"asked": tally.total, "right": round(tally.percent, 2)}
        for kind, tally in sorted(tallies.items())
    }


def measure_pair(
    target: Loaded,
    drafts: dict[str, Loaded],
    groups: Sequence[Group],
    answers: list[list[list[int]]],
    *,
    is_video_first: bool,
) -> dict[str, Any]:
    """Returns the agreement along the target's answers, by draft and share of visual tokens."""
    end = target.encoder.special.im_end
    results: dict[str, Any] = {}
    for name, draft in drafts.items():
        for label, share in (("all tokens", None), ("a tenth, at random", 0.1), ("blind", 0.0)):
            agreement = Agreement()
            for group, ids in zip(groups, tqdm(answers, desc=f"{name}, {label}"), strict=True):
                keep = None if share is None else round(share * group.clips[0].size.num_visual)
                asked = Asked(group.frames, [texts.DETAILED[0]] * len(group.clips))
                said: list[IntArray] = greedy_along(
                    draft, asked, ids, is_video_first=is_video_first, keep=keep
                )
                for own, answer in zip(said, ids, strict=True):
                    agreement.add_answer(
                        own, [*answer, end], [*content_mask(answer, target.tokenizer), False]
                    )
            results[f"{name}, {label}"] = agreement.summary()
    return results


@torch.no_grad()
def step_ms(loaded: Loaded, *, context: int, repeats: int = 60) -> float:
    """Returns the median milliseconds of a decode step through transformers' forward."""
    model: Any = loaded.model
    ids = torch.full((1, context), 300)
    out = model(input_ids=ids, use_cache=True)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        out = model(input_ids=ids[:, :1], cache=out.past_key_values, use_cache=True)
        times.append(1e3 * (time.perf_counter() - started))
    return float(np.median(times))


def measure_speed(folder: Path) -> dict[str, Any]:
    """Returns step times of both models after 200 tokens, and their ratio, by dtype."""
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        slow, fast = (
            step_ms(load(folder / name, dtype), context=200) for name in ("target", "draft")
        )
        results[str(dtype).removeprefix("torch.")] = {
            "target_ms": round(slow, 2),
            "draft_ms": round(fast, 2),
            "ratio": round(slow / fast, 2),
        }
    return results


def show(title: str, rows: dict[str, Any]) -> None:
    """Prints a table with a row per nested entry, and the other figures below it."""
    console = Console(file=sys.stdout, width=110)
    nested = {name: value for name, value in rows.items() if isinstance(value, dict)}
    if nested:
        table = Table("", *next(iter(nested.values())), title=title)
        for name, value in nested.items():
            table.add_row(name, *(str(entry) for entry in value.values()))
        console.print(table)
    for name, value in rows.items():
        if not isinstance(value, dict):
            console.print(f"{name}: {value}")


def main() -> None:
    """Measure the figures chosen on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.evaluate",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("target", "questions", "pair", "speed", "all"))
    parser.add_argument(
        "--clips", type=int, default=200, help="how many held-out clips (default: 200)"
    )
    parser.add_argument(
        "--kind", choices=("mixed", "short", "long"), default="mixed", help="clip sizes"
    )
    parser.add_argument("--order", choices=("video-first", "question-first"), default="video-first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", type=Path, default=MODELS, help="folder with target/, draft/, undistilled/"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {
        "kind": arguments.kind,
        "order": arguments.order,
        "seed": arguments.seed,
    }
    wanted = (
        ("target", "questions", "pair", "speed") if arguments.what == "all" else (arguments.what,)
    )
    if "speed" in wanted:
        figures["speed"] = measure_speed(arguments.models)
        show("one decode step, in milliseconds", figures["speed"])
    if set(wanted) - {"speed"}:
        _measure_clips(arguments, wanted, figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def _measure_clips(
    arguments: argparse.Namespace, wanted: Sequence[str], figures: dict[str, Any]
) -> None:
    dtype = getattr(torch, arguments.dtype)
    target = load(arguments.models / "target", dtype)
    groups = held_out_groups(arguments.kind, arguments.clips, arguments.seed)
    is_video_first = arguments.order == "video-first"
    if "target" in wanted or "pair" in wanted:
        answers = descriptions_of(target, groups, is_video_first=is_video_first)
    if "target" in wanted:
        measured = measure_target(target, groups, answers)
        figures["target"] = measured
        show("statements of the target, percent right", measured["attributes"])
        show("", {name: value for name, value in measured.items() if name != "attributes"})
    if "questions" in wanted:
        figures["questions"] = measure_questions(target, groups, arguments.seed)
        show("short answers, percent right", figures["questions"])
    if "pair" in wanted:
        names = [name for name in ("draft", "undistilled") if (arguments.models / name).exists()]
        drafts = {name: load(arguments.models / name, dtype) for name in names}
        figures["pair"] = measure_pair(
            target, drafts, groups, answers, is_video_first=is_video_first
        )
        show("equal greedy tokens, percent", figures["pair"])


if __name__ == "__main__":
    main()
