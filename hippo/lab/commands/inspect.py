"""``hippo inspect``: draws which visual tokens each pruning strategy keeps."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hippo.base.extras import needs_extra
from hippo.cli.stack import BUNDLED_PAIR
from hippo.errors import InvalidRequestError
from hippo.lab.commands.options import check_folders, check_range
from hippo.types import FramePlan, Pruning, PruningStrategy

_STRATEGIES = ("holistic", "attention", "specvlm", "uv", "uniform")
_CHOICES = tuple(strategy.value for strategy in PruningStrategy)
HELP = "draw which visual tokens the draft would see"
DESCRIPTION = (
    "Draws the frames of a video with the visual tokens marked that the draft "
    "would see, a row a strategy."
)
EXAMPLES = """\
examples:
  hippo inspect clip.mp4
  hippo inspect clip.mp4 --question "What moves?" --ratio 0.95 --out moves.png
  hippo inspect clip.mp4 --strategies holistic,uv,random --scores
  hippo inspect clip.mp4 --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda --dtype bfloat16

Nothing needs to be running: the target is loaded here, and only its first layers run.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    add = parser.add_argument
    add("video", help="a video file")
    add(
        "--out", type=lambda text: Path(text).expanduser(), default=Path("kept.png"),
        help="a PNG file (default: %(default)s)",
    )  # fmt: skip
    add("--question", default="Describe the video.", help="default: %(default)s")
    add("--question-first", action="store_true", help="the question stands before the video")
    add("--ratio", type=float, default=0.9, help="share pruned (default: 0.9)")
    add(
        "--strategies", default=",".join(_STRATEGIES),
        help=f"comma-separated, of {', '.join(_CHOICES)} (default: %(default)s)",
    )  # fmt: skip
    add("--scores", action="store_true", help="also a row for each score")
    add("--columns", type=int, default=8, help="frames shown (default: 8)")
    add("--fps", type=float, default=0.0, help="sampled frames per second")
    add(
        "--model", default=str(BUNDLED_PAIR / "target"),
        help="the target: folder or hub name (default: the bundled one)",
    )  # fmt: skip
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--score-layers", type=int, help="layers tapped (default: half)")
    add("--max-context-length", type=int, default=16384, help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Scores the visual tokens and draws the picture; returns the exit code."""
    strategies = _strategies(arguments.strategies)
    _check(arguments)
    data = _read(arguments.video)
    with needs_extra("engine", "`hippo inspect` runs the target here and"):
        from hippo.lab.commands.picture import draw
        from hippo.lab.commands.scoring import decode, score, score_layers
        from hippo.models.interface.context import most_text_tokens, visual_limit
        from hippo.models.interface.plan import LoadPlan
        from hippo.models.load import load_model
        from hippo.pruning.select import needs_alignment
    has_alignment = any(map(needs_alignment, strategies))
    console = Console(stderr=True)
    with console.status("loading the target ..."):
        model = load_model(
            LoadPlan(
                arguments.model,
                device=arguments.device,
                dtype=arguments.dtype,
                max_context_length=arguments.max_context_length,
            )
        )
        layers = score_layers(arguments.score_layers, model.num_layers, has_alignment=has_alignment)
    with console.status("scoring the visual tokens ..."):
        num_others = most_text_tokens(arguments.question)
        most = visual_limit(arguments.max_context_length, num_others)  # as in the gateway
        plan = FramePlan(fps=arguments.fps, max_visual_tokens=most)
        clip = decode(data, plan, model.frame_limits)
        scored = score(
            model,
            clip,
            arguments.question,
            is_video_first=not arguments.question_first,
            num_layers=layers,
            has_alignment=has_alignment,
        )
    rows = [*(scored.score_rows() if arguments.scores else ())]
    rows += [scored.kept_row(Pruning(strategy, arguments.ratio)) for strategy in strategies]
    shown = _evenly(scored.grid[0], arguments.columns)
    pairs = [place * clip.frames.shape[0] // scored.grid[0] for place in shown]
    total = scored.num_visual_tokens
    order = f"question {'before' if scored.is_question_first else 'after'} the video"
    picture = draw(
        title=f"{Path(arguments.video).name}: {arguments.question}",
        subtitle=f"{total:,} visual tokens; {arguments.ratio:.0%} pruned; {order}; "
        f"attention of the first {layers} of {model.num_layers} layers",
        frames=clip.frames[pairs],
        seconds=[clip.frame_seconds[place] for place in pairs],
        rows=[replace(row, values=row.values[shown]) for row in rows],
    )
    try:
        picture.save(arguments.out, optimize=True)
    except OSError as error:
        raise InvalidRequestError(f"{arguments.out} cannot be written: {error}") from None
    Console().print(f"written to {arguments.out}", highlight=False, soft_wrap=True)
    return 0


def _evenly(count: int, most: int) -> list[int]:
    """Returns at most ``most`` of ``count`` indices, evenly spaced from 0."""
    shown = min(count, most)
    return [place * count // shown for place in range(shown)]


def _strategies(text: str) -> list[PruningStrategy]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _CHOICES:
            raise InvalidRequestError(f"--strategies: {name!r} is none of {', '.join(_CHOICES)}")
    if not names:
        raise InvalidRequestError(f"--strategies: give at least one of {', '.join(_CHOICES)}")
    return [PruningStrategy(name) for name in names]


def _check(arguments: argparse.Namespace) -> None:
    check_range(arguments, 0, "ratio", most=0.99)
    check_range(arguments, 1, "columns")
    check_folders(arguments, "out")
    if arguments.out.suffix.lower() != ".png":
        raise InvalidRequestError(f"--out is {arguments.out}; its name must end in .png")


def _read(video: str) -> bytes:
    try:
        return Path(video).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{video} cannot be read: {error.strerror}") from None
