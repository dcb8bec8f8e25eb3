"""Measures the figures of the target's model card: `python -m demo.evaluate --help`."""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from demo.figures import ATTRIBUTES, Score, Tally
from demo.training.export import MODELS
from demo.training.inference import Asked, greedy, load
from demo.world import clips, texts
from demo.world.scenes import Scene
from hippo.client.tables import markdown

ABOUT = """\
Asks the bundled target for long descriptions of held-out clips (rendered, encoded to H.264 and
decoded again), greedily: are its statements right, and are they wrong for another clip?
"""
_MOST_TOKENS = 9000  # in a batch of prompts and answers


def said_about(
    model: Path, kind: clips.Kind, count: int, *, seed: int, is_video_first: bool
) -> list[tuple[Scene, str]]:
    """Returns the scenes of held-out clips, each with the description of it; clips of one size are
    asked about together."""
    target = load(model)
    by_size: dict[tuple[int, ...], list[tuple[Scene, Any]]] = defaultdict(list)
    for index in tqdm(range(count), desc="clips"):
        clip = clips.held_out(kind, index, seed=seed)
        frames = clips.through_codec(clip)
        by_size[frames.shape].append((clip.scene, frames))
    found: list[tuple[Scene, str]] = []
    for (num_frames, height, width, _), members in tqdm(by_size.items(), desc="sizes"):
        num_tokens = num_frames // 2 * (height // 28) * (width // 28) + 150
        most = max(2, _MOST_TOKENS // num_tokens)
        for start in range(0, len(members), most):
            part = members[start : start + most]
            frames = np.stack([frames for _, frames in part])
            asked = Asked(frames, [texts.DETAILED[0]] * len(part))
            answers = greedy(target, asked, is_video_first=is_video_first)
            for (scene, _), answer in zip(part, answers, strict=True):
                found.append((scene, str(target.tokenizer.decode(answer))))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=ABOUT)
    add = parser.add_argument
    add("--clips", type=int, default=200, help="how many held-out clips (default: 200)")
    add("--kind", choices=("mixed", "short", "long"), default="mixed", help="clip sizes")
    add("--question-first", action="store_true", help="the question stands before the video")
    add("--seed", type=int, default=0)
    add("--model", type=Path, default=MODELS / "target", help="default: the bundled target")
    add("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = said_about(
        args.model, args.kind, args.clips, seed=args.seed, is_video_first=not args.question_first
    )
    own, swapped, exact = Score(), Score(), Tally()
    for index, (scene, text) in enumerate(found):
        exact.add_case(text == texts.detailed(scene))
        own.add_clip(texts.parse(text), texts.facts(scene))
        for shift in range(1, min(6, len(found))):
            _, foreign = found[(index + shift) % len(found)]
            swapped.add_clip(texts.parse(foreign), texts.facts(scene))
    rows = []
    for name in ATTRIBUTES:
        right, other = own.strict[name], swapped.strict if name == "position" else swapped.placed
        rows.append([name, right.total, f"{right.percent:.2f}", f"{other[name].percent:.2f}"])
    sys.stdout.write(markdown(("attribute", "statements", "right", "swapped"), rows))
    sys.stdout.write(
        f"\n\n{own.recall.percent:.2f} % of all facts are said and right, {exact.percent:.1f} % of "
        "the answers are right in every word.\n"
    )


if __name__ == "__main__":
    main()
