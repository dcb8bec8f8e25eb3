"""``hippo distill`` on the bundled pair, from its undistilled draft: ``python -m
bench.drafts.distill``.

Clips of scenes that occur in no training are written, long enough for pruning, with two questions
of a description each. The command runs as a user's would. Then three drafts are compared on the
held-out answers: the one before, the one that came out, and the bundled one, which the demo's own
training distilled. A run that was interrupted continues.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from tqdm import tqdm

from bench.base.environment import ROOT
from bench.base.options import parser_of
from demo.world import clips, texts
from hippo.cli.stack import BUNDLED_PAIR
from hippo.lab.distill.answers import AnswerFile
from hippo.lab.distill.batches import ExampleBatch
from hippo.lab.distill.examples import DraftExample, example_path, write_examples
from hippo.lab.distill.questions import asked_about, plan_questions
from hippo.lab.distill.student import agreements, new_student
from hippo.lab.distill.training import agreement_of
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model

_SEED = 11  # of the clips; the other benchmarks have 0
_OPTIONS = (
    "--dtype bfloat16 --all-weights --learning-rate 4e-4 --epochs 4 --batch-tokens 4096 "
    "--accumulate 1 --patience 20"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and the comparison; returns the command's exit code."""
    parser = parser_of("bench.drafts.distill", __doc__)
    parser.add_argument("--num-clips", type=int, default=540, help="default: %(default)s")
    parser.add_argument("--options", default=_OPTIONS, help=f"default: {_OPTIONS}")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out/distill")
    args = parser.parse_args(argv)
    videos, out = args.out / "videos", args.out / "out"
    questions = videos / "questions.jsonl"
    if not questions.exists():
        write_questions(videos, args.num_clips)
    command = [
        "distill", "--target", str(BUNDLED_PAIR / "target"),
        "--draft", str(BUNDLED_PAIR / "undistilled"), "--videos", str(videos),
        "--questions", str(questions), "--out", str(out),
        *shlex.split(args.options),
    ]  # fmt: skip
    console = Console()
    console.print(f"hippo {shlex.join(command)}", soft_wrap=True, highlight=False)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "hippo.cli", *command], cwd=ROOT, check=False)
    if done.returncode:
        return done.returncode
    console.print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")
    folders = {
        "undistilled": BUNDLED_PAIR / "undistilled",
        "distilled here": out / "draft",
        "bundled": BUNDLED_PAIR / "draft",
    }
    found = {name: agreement(folder, out, videos) for name, folder in folders.items()}
    for name, value in found.items():
        console.print(f"{name}: {value:.2%}")
    before, after, bundled = found.values()
    share = (after - before) / (bundled - before)
    console.print(f"share of the way to the bundled draft: {share:.0%}")
    return 0


def write_questions(folder: Path, num_clips: int) -> None:
    """Writes clips and the file of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in tqdm(range(num_clips), desc="clips"):
        clip = clips.held_out("long", index, seed=_SEED)
        clips.write_clip(clip, folder)
        exchanges = texts.descriptions(clip.scene, np.random.default_rng((_SEED, index)))
        del exchanges[index % len(exchanges)]
        for exchange in exchanges:
            name = f"{clip.name} {exchange.kind}"
            line = {"id": name, "video": f"{clip.name}.mp4", "question": exchange.question}
            lines.append(json.dumps(line))
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@torch.inference_mode()
def agreement(draft: Path, out: Path, videos: Path) -> float:
    """Returns the share of the tokens of the held-out answers that a draft proposes, with the
    visual tokens dropped as in serving."""
    settings = json.loads((out / "distill.json").read_text(encoding="utf-8"))
    planned = plan_questions(
        asked_about(videos, videos / "questions.jsonl", num_default=0),
        ratio=settings["pruning_ratio"],
        temperatures=settings["temperatures"],
        held_out_share=settings["held_out_share"],
        seed=settings["seed"],
    )
    answers = AnswerFile(out / "answers.jsonl").answers
    held_out = [each for each in planned if each.is_held_out and each.id in answers]
    longest = max(answers[each.id].num_prompt_tokens for each in held_out)
    model = load_model(LoadPlan(str(draft), dtype="float32", max_context_length=longest + 1))
    student = new_student(draft, torch.float32, lora_rank=None)
    traces = []
    with tempfile.TemporaryDirectory() as folder:
        wanted = [
            (example_path(Path(folder), number), question, answers[question.id])
            for number, question in enumerate(held_out)
        ]
        write_examples(model, wanted, lambda: None)
        for path, *_ in wanted:
            batch = ExampleBatch.of([DraftExample.load(path)])
            traces += agreements(student(batch), batch)
    return agreement_of(traces)


if __name__ == "__main__":
    sys.exit(main())
