"""Held-out clips with a file of questions and their right answers, for `hippo bench --questions`.

`python -m demo.world.questions FOLDER --num-clips 50` writes mp4 files and `questions.jsonl`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from demo.world import clips, texts

_SHORT_QUESTIONS = 2  # about each clip, beside a description


def write_questions(folder: Path, *, num_clips: int, seed: int = 0) -> Path:
    """Write clips and questions into the folder; returns the file of questions.

    Files depend only on the arguments, and no scene occurs in training. A question's category is
    the kind of its exchange.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in tqdm(range(num_clips), desc="clips"):
        clip = clips.held_out("mixed", index, seed=seed)
        clips.write_clip(clip, folder)
        rng = np.random.default_rng((clips.HELD_OUT, seed, index))
        described = texts.descriptions(clip.scene, rng)
        asked = [described[index % len(described)]]
        asked += texts.short_questions(clip.scene, rng, _SHORT_QUESTIONS)
        for number, exchange in enumerate(asked):
            lines.append(
                json.dumps(
                    {
                        "id": f"{clip.name}-{number}",
                        "video": f"{clip.name}.mp4",
                        "question": exchange.question,
                        "answer": exchange.answer,
                        "category": exchange.kind,
                    }
                )
            )
    goal = folder / "questions.jsonl"
    goal.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return goal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.world.questions", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-clips", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.num_clips < 1:
        parser.error("--num-clips must be at least 1")
    write_questions(arguments.folder, num_clips=arguments.num_clips, seed=arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
