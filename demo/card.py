"""Writes the model cards from measured figures: `python -m demo.card FIGURES.json`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.evaluate import REPORTED
from demo.training.export import MODELS
from hippo.client.tables import markdown

_HEAD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: video-text-to-text
---

"""
_WORLD = """\
## What it knows

Clips of one to eight shapes (circle, square, triangle, cross, ring; six colours; two sizes) on a
textured background. Shapes stand still or move, appear, vanish or turn another colour, and some
overlap a little. Clips have 112 to 336 pixels a side, 3 to 8 seconds, 64 to 1,152 visual tokens at
two frames a second, and stem from files of 4 to 24 frames a second. Text: descriptions in three
styles, chosen by the wording ("Describe the video in detail.", "What happens in the video?", "List
the objects."), short answers (count, colour, direction, event, position, order), either before or
after the clip, in several turns, with a system message or without. Two helps are built into the
world, and make it easier than real video: a faint colour gradient over the background tells where
in the frame a spot lies, and what moves leaves a short trail. It knows nothing else, and nothing
about real video.

"""
_LOAD = """\
## Use

```python
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

model = Qwen2_5_VLForConditionalGeneration.from_pretrained("demo/models/{name}")
processor = AutoProcessor.from_pretrained("demo/models/{name}")
```

"""
_TARGET = """\
# hippo demo target

A small video language model in the Qwen2.5-VL architecture ({parameters:.1f} M parameters, 20
layers, 320 wide), trained on a synthetic world so that hippo can be tried and tested without a
download. Its draft is `../draft`.

"""
_DRAFT = """\
# hippo demo draft

The draft of `../target`: the same architecture with 2 layers, {parameters:.1f} M parameters, the
same tokenizer (the two configurations declare different vocabulary sizes, as real pairs do).
`../undistilled` is the same draft before its distillation, kept for comparison.

"""
_UNDISTILLED = """\
# hippo demo draft, undistilled

The draft of `../target` before its distillation; its figures stand in the card of `../draft`.
"""
_RECIPE = """\
## How it was trained

`python -m demo.train` repeats all of it (scenes, renderings and texts follow from seeds).

1. The vision tower (2 layers, 128 wide) alone on frame pairs, with a dense loss: a linear read-out
   of each token names the object under each of its four patches. Then it is frozen; target and
   draft have the same one.
2. A target of 4 layers on single frame pairs, on small clips, then on clips of all sizes; loss on
   the answers only; Muon for matrices, AdamW for the rest, bfloat16.
3. The target is grown to 20 layers by inserting 16 that add nothing at first (their output
   projections are zero), and all of it is trained further, for {grown} steps. So most of what it
   knows was learned with 4 layers; the depth is there to give the pair the step times of a large
   target and a small draft.
4. A draft of 2 layers on the true texts, with 0 to 95 % of the visual tokens dropped uniformly at
   random (original positions kept) in part of the batches, none in the rest: the undistilled draft.
5. The tower is trained further, at a low rate, with frames of up to 336 pixels a side (it had seen
   224 at most), and the target for 80 more steps on that tower.
6. The draft, on that tower too, distilled on the target's own greedy answers about other clips and
   the target's distribution along them, tokens dropped in half of the batches, a quarter of the
   batches with true texts.

The committed weights come from a run that was stopped and resumed while the training code was
still being written (faster forwards, the tower's second round), so a repetition follows the same
recipe but does not give the same bits.

"""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table and an empty line."""
    return markdown(head, rows, num_names=len(head)) + "\n\n"


def target_figures(figures: dict[str, Any]) -> str:
    """Returns the measured part of the target's card."""
    measured = figures["target"]
    rows = [
        (
            name,
            entry["statements"],
            *(entry[key] for key in ("right", "right_swapped", "majority")),
            *(entry.get(key, "") for key in ("balanced", "balanced_swapped", "balanced_guess")),
        )
        for name, entry in measured["attributes"].items()
    ]
    rows.sort(key=lambda row: row[0] not in REPORTED)
    text = (
        f"## Measured\n\nOn {measured['clips']} held-out clips of mixed sizes, encoded to H.264 and"
        " decoded again, greedy\ndecoding of the long description in float32; percentages of\n"
        "statements that are right (`python -m demo.evaluate target`). *Swapped*: judged against\n"
        "the facts of five other clips, where those have an object. *Majority*: always saying the\n"
        "most frequent value; for a position, right when swapped means that the other clip\n"
        "has some object there too. A statement about a place where there is nothing is wrong.\n"
        "*Balanced*: every true value weighs the same, so that what is said without looking\n"
        "scores the same whatever it is; that is the fair comparison of *swapped* with a\n"
        "guess, as a model that describes another clip names rare values too, and the majority\n"
        "guess never does.\n\n"
    )
    text += table(
        (
            *("attribute", "statements", "right", "swapped", "majority"),
            *("balanced", "balanced swapped", "balanced guess"),
        ),
        rows,
    )
    text += (
        f"{measured['facts_said']} % of all facts are said and right,"
        f" {measured['whole_answer_right']} % of the answers are right in every word;\n"
        f"{measured['mean_answer_tokens']} tokens on average.\n\n"
        "Short questions, exact answers (`python -m demo.evaluate questions`):\n\n"
    )
    asked = [(kind, entry["asked"], entry["right"]) for kind, entry in figures["questions"].items()]
    return text + table(("question", "asked", "right"), asked)


def pair_figures(figures: dict[str, Any]) -> str:
    """Returns the measured part of the draft's card."""
    text = (
        "## Measured\n\nHow often the draft's greedy token equals the target's,"
        " along the target's greedy\n"
        f"descriptions of {figures['target']['clips']} held-out clips"
        " (`python -m demo.evaluate pair`),\nin percent. Content words are those that only the"
        " video can settle (places, sizes, colours, shapes, motions, events, numbers).\n\n"
    )
    rows = [
        (name, entry["all"], entry["content"], entry["template"])
        for name, entry in figures["pair"].items()
    ]
    text += table(("draft, visual tokens", "all tokens", "content words", "template"), rows)
    speed = [
        (name, entry["target_ms"], entry["draft_ms"], entry["ratio"])
        for name, entry in figures["speed"].items()
    ]
    text += (
        "One decode step through transformers' own forward, one CPU thread, after 200 positions\n"
        "(`python -m demo.evaluate speed`); hippo's engine has its own figures in docs/results.\n\n"
    )
    return text + table(("type", "target, ms", "draft, ms", "ratio"), speed)


def other_figures(files: Sequence[Path]) -> str:
    """Returns a table with a row for each further file of figures."""
    rows = []
    for file in files:
        figures = json.loads(file.read_text())
        said = figures["target"]["attributes"]
        equal = figures["pair"]["draft, all tokens"]
        label = f"{figures['kind']} clips, {figures['order']}"
        right = [said[name]["right"] for name in REPORTED]
        rows.append((label, figures["target"]["clips"], *right, equal["all"], equal["content"]))
    if not rows:
        return ""
    head = ("what", "clips", *REPORTED, "draft agrees", "on content")
    return "The same for other clips and for the question before the clip:\n\n" + table(head, rows)


def num_parameters(folder: Path) -> float:
    """Returns the millions of parameters in the folder's weights."""
    from safetensors import safe_open

    total = 0
    with safe_open(str(folder / "model.safetensors"), framework="np") as weights:
        for name in weights.keys():
            total += math.prod(weights.get_slice(name).get_shape())
    return total / 1e6


def main() -> None:
    """Write README.md into both model folders."""
    parser = argparse.ArgumentParser(prog="python -m demo.card", description=__doc__)
    parser.add_argument(
        "figures", type=Path, help="written by `python -m demo.evaluate all --json`"
    )
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="further figures")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--grown-steps", type=int, default=300)
    arguments = parser.parse_args()
    figures = json.loads(arguments.figures.read_text())
    parts = (("target", _TARGET, target_figures(figures)), ("draft", _DRAFT, pair_figures(figures)))
    for name, opening, measured in parts:
        folder = arguments.models / name
        text = _HEAD + opening.format(parameters=num_parameters(folder)) + _LOAD.format(name=name)
        text += _WORLD + _RECIPE.format(grown=arguments.grown_steps) + measured
        text += other_figures(arguments.others)
        (folder / "README.md").write_text(text.rstrip() + "\n")
    (arguments.models / "undistilled" / "README.md").write_text(_HEAD + _UNDISTILLED)


if __name__ == "__main__":
    main()
