"""``hippo distill``: trains a draft on the answers of its target."""

import argparse
import importlib.util
from pathlib import Path

from rich.console import Console

from hippo.base.extras import needs_extra
from hippo.cli.up import add_stack_arguments, stack_options, warn_of_unused_gpus
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.commands.options import check_positive, check_range
from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO

HELP = "train a draft on the answers of its target"
DESCRIPTION = """\
Trains a draft on the answers of its target to questions about your videos, so that more of its
tokens are accepted. The target answers through its service, many questions at once; the draft
learns from the answers with the visual tokens dropped that the target drops for it in serving. Some
videos are held out: their answers say when the training is enough, and the pair is served before
and after it. The result in OUT/draft is an ordinary checkpoint.
"""
EXAMPLES = """\
examples:
  hippo distill --target Qwen/Qwen2.5-VL-32B-Instruct --target-device cuda:0 \\
                --draft Qwen/Qwen2.5-VL-7B-Instruct --draft-device cuda:1 \\
                --videos /data/videos --out distilled
  hippo distill ... --questions questions.jsonl       as `hippo bench --questions` takes it
  hippo distill ... --all-weights --learning-rate 1e-5
  hippo up --target-model ... --draft-model distilled/draft

The same command goes on after a stop: answers, vision features and the training are kept in OUT. A
training goes on with as many GPUs as it began with. Questions that the target refused are asked
again until the training begins. To ask them later, or to train again with other options, delete
OUT/training, OUT/draft and OUT/after.json: the answers stay.

what it needs:
  disk     vision features of the visual tokens that the draft sees: 18 MB a question for a 7B
           draft and a video of 25,000 visual tokens, ten times that for the tenth of the questions
           in which nothing is dropped; and 16 bytes a trained weight for going on
  memory   the pair as `hippo up` takes it; then, without the target, on each GPU that trains: the
           draft's language model and, for each trained weight, 12 bytes (an adapter of rank 64 has
           2 % of a 7B draft's weights; all weights are held in float32, 16 bytes each); at the end
           4 bytes for each weight of the draft on the host
  GPUs     all that are visible train (CUDA_VISIBLE_DEVICES)
"""
_RATES = {"adapters": 2e-4, "all weights": 1e-5}
_RANK = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    group = parser.add_argument_group("what is trained on what")
    add = group.add_argument
    for role in ("target", "draft"):
        add(
            f"--{role}", dest=f"{role}_model", required=True, metavar="MODEL",
            help=f"{role} checkpoint: folder or hub name",
        )  # fmt: skip
    add("--videos", type=Path, required=True, metavar="DIR", help="searched with its folders")
    add(
        "--questions", type=Path, metavar="FILE",
        help="a JSONL file of questions about the videos (default: general questions)",
    )  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder, or one to go on with")
    group = parser.add_argument_group("the target's answers")
    add = group.add_argument
    add("--questions-per-video", type=int, default=3, help="without --questions (default: 3)")
    add("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    add(
        "--temperatures", default="0", metavar="T,T,...",
        help="each question is answered once at each; 0 is greedy (default: 0)",
    )  # fmt: skip
    add("--held-out-share", type=float, default=0.1, help="of the videos (default: 0.1)")
    add(
        "--pruning-ratio", type=float, default=PRUNING_RATIO,
        help="as in serving; the training's questions vary it (default: %(default)s)",
    )  # fmt: skip
    add(
        "--pruning-min-visual-tokens", type=int, default=MIN_VISUAL_TOKENS,
        help="as in serving (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--lora-rank", type=int, help=f"of the adapters, merged at the end (default: {_RANK})")
    add(
        "--all-weights", action="store_true",
        help="train all weights of the language model instead; the vision tower is never trained",
    )  # fmt: skip
    add("--learning-rate", type=float, help="default: 2e-4, with --all-weights 1e-5")
    add("--epochs", type=float, default=3.0, help="at most (default: 3)")
    add(
        "--batch-tokens", type=int, default=8192,
        help="tokens of prompts and answers in a forward of one GPU (default: %(default)s)",
    )  # fmt: skip
    add("--accumulate", type=int, default=4, help="forwards of a step (default: 4)")
    add(
        "--patience", type=int, default=5,
        help="evaluations without a better agreement until it stops (default: 5)",
    )  # fmt: skip
    add(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction,
        help="less memory, a third more time (default: on GPUs)",
    )  # fmt: skip
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--measured-questions", type=int, default=12,
        help="held-out questions asked before and after, three answers each (default: 12)",
    )  # fmt: skip
    add_stack_arguments(parser, port=0, has_models=False)


def run(arguments: argparse.Namespace) -> int:
    """Trains a draft and prints the table; returns the exit code."""
    check_options(arguments)
    with needs_extra("distill", "`hippo distill`"):
        from hippo.lab.commands.distill_run import Distillation
    console = Console(stderr=True)
    warn_of_unused_gpus(arguments, console)
    Distillation(arguments, stack_options(arguments), Console(), console).run()
    return 0


def check_options(arguments: argparse.Namespace) -> None:
    """Raises InvalidRequestError for an option out of range; completes those without a value."""
    check_range(
        arguments, 1, "questions_per_video", "lora_rank", "batch_tokens", "accumulate", "patience",
        "measured_questions",
    )  # fmt: skip
    check_range(arguments, 2, "max_tokens")
    check_range(arguments, 0, "pruning_min_visual_tokens", "seed")
    check_range(arguments, 0, "pruning_ratio", most=0.99)
    check_positive(arguments, "learning_rate", "epochs")
    if not 0 < arguments.held_out_share < 1:
        raise InvalidRequestError("--held-out-share must be above 0 and below 1")
    arguments.temperatures = _temperatures(arguments.temperatures)
    if arguments.all_weights and arguments.lora_rank is not None:
        raise InvalidRequestError("--lora-rank has no effect with --all-weights: leave one out")
    if not arguments.all_weights:
        arguments.lora_rank = arguments.lora_rank or _RANK
        if importlib.util.find_spec("peft") is None:
            raise HippoError(
                "adapters need peft: pip install 'hippo-serve[distill]', or give --all-weights"
            )
    if arguments.learning_rate is None:
        arguments.learning_rate = _RATES["all weights" if arguments.all_weights else "adapters"]
    if arguments.draft_quantization is not None:
        raise InvalidRequestError(
            "--draft-quantization: a draft is trained unquantised; quantise OUT/draft in serving"
        )


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 2 for each in found):
        raise InvalidRequestError(f"--temperatures {text}: expected numbers of 0 to 2, such as 0,1")
    return found
