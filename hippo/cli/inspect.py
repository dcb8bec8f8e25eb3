"""``hippo inspect``: a picture of which visual tokens each strategy keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hippo.cli.parsers import Subparsers, add_command
from hippo.cli.stack import BUNDLED_PAIR
from hippo.errors import HippoError, InvalidRequestError
from hippo.types import FramePlan, Pruning, PruningStrategy

if TYPE_CHECKING:
    from hippo.cli.picture import KeptRow, ScoreRow
    from hippo.models.base import DecodedMedia, Prompt, VideoLanguageModel
    from hippo.pruning.select import VisualScores


_STRATEGIES = ("holistic", "attention", "specvlm", "uniform")
_CHOICES = tuple(strategy.value for strategy in PruningStrategy)
_EXAMPLES = """\
examples:
  hippo inspect clip.mp4
  hippo inspect clip.mp4 --question "What moves?" --ratio 0.95 --out moves.png
  hippo inspect clip.mp4 --strategies holistic,hybrid,random --scores
  hippo inspect clip.mp4 --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda --dtype bfloat16

Nothing needs to be running: the target is loaded here, and only its first layers run.
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "inspect",
        run,
        help="draw which visual tokens the draft would see",
        description="Draws the frames of a video with the visual tokens marked that the draft "
        "would see, a row a strategy.",
        examples=_EXAMPLES,
    )
    parser.add_argument("video", help="a video file")
    parser.add_argument(
        "--out",
        type=lambda text: Path(text).expanduser(),
        default=Path("kept.png"),
        help="a PNG file (default: %(default)s)",
    )
    parser.add_argument("--question", default="Describe the video.", help="default: %(default)s")
    parser.add_argument(
        "--question-first", action="store_true", help="the question stands before the video"
    )
    parser.add_argument("--ratio", type=float, default=0.9, help="share pruned (default: 0.9)")
    parser.add_argument(
        "--strategies",
        default=",".join(_STRATEGIES),
        help=f"comma-separated, of {', '.join(_CHOICES)} (default: %(default)s)",
    )
    parser.add_argument("--scores", action="store_true", help="also a row for each score")
    parser.add_argument("--columns", type=int, default=8, help="frames shown (default: 8)")
    parser.add_argument("--fps", type=float, default=0.0, help="frames a second looked at")
    parser.add_argument(
        "--model",
        default=str(BUNDLED_PAIR / "target"),
        help="the target: folder or hub name (default: the bundled one)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--score-layers", type=int, help="layers tapped (default: half)")
    parser.add_argument(
        "--max-context-length", type=int, default=16384, help="default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws; the exit code."""
    strategies = _strategies(arguments.strategies)
    _check(arguments)
    data = _read(arguments.video)
    try:
        from hippo.cli.picture import draw
        from hippo.models.loading import load_model
        from hippo.models.plan import LoadPlan
    except ImportError as error:
        raise HippoError(
            f"`hippo inspect` runs the target here and needs hippo-serve[engine]: {error}"
        ) from None
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
        layers = _score_layers(arguments.score_layers, model.num_layers)
    with console.status("scoring the visual tokens ..."):
        clip = _decode(data, FramePlan(fps=arguments.fps))
        scored = score(
            model,
            clip,
            arguments.question,
            is_video_first=not arguments.question_first,
            score_layers=layers,
        )
    rows = picture_rows(scored, strategies, ratio=arguments.ratio, has_scores=arguments.scores)
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
        rows=[_only(row, shown) for row in rows],
    )
    try:
        picture.save(arguments.out, optimize=True)
    except OSError as error:
        raise InvalidRequestError(f"{arguments.out} cannot be written: {error}") from None
    Console().print(f"written to {arguments.out}", highlight=False, soft_wrap=True)
    return 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt's grid and what the target found out about its visual tokens."""

    grid: tuple[int, int, int]  # frames, rows, columns
    scores: VisualScores
    is_question_first: bool  # in the prompt: a family's chat template may have its own order

    @property
    def num_visual_tokens(self) -> int:
        """Tokens of the grid."""
        frames, rows, columns = self.grid
        return frames * rows * columns


def score(
    model: VideoLanguageModel,
    clip: DecodedMedia,
    question: str,
    *,
    is_video_first: bool,
    score_layers: int,
) -> Scored:
    """Runs the vision tower and the first layers of the prefill.

    Raises InvalidRequestError when there is nothing to prune, as in an image.
    """
    from hippo.models.base import AttentionTap
    from hippo.pruning.select import VisualScores
    from hippo.types import ChatMessage, MediaPart, TextPart

    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(question))
    message = ChatMessage("user", parts if is_video_first else parts[::-1])
    prompt: Prompt = model.prepare([message], [clip], FramePlan())
    if not prompt.visual_grids:
        raise InvalidRequestError("there are no visual tokens to prune: give a video")
    visual = model.embed_visual(prompt)
    assert visual is not None
    tap = AttentionTap(score_layers)
    prefill = model.prefill(0, prompt, visual, None, tap)
    while tap.scores is None:
        next(prefill)
    num_visual = int(prompt.visual_indices.shape[0])
    return Scored(
        prompt.visual_grids[0],
        VisualScores(tap.scores, visual[:num_visual]),
        is_question_first=bool(prompt.question_indices[0] < prompt.visual_indices[0]),
    )


def picture_rows(
    scored: Scored, strategies: Sequence[PruningStrategy], *, ratio: float, has_scores: bool
) -> list[KeptRow | ScoreRow]:
    """What each strategy keeps and, if wished, the scores, over the whole grid."""
    import torch

    from hippo.cli.picture import KeptRow, ScoreRow
    from hippo.pruning.scores import distinctness, normalise
    from hippo.pruning.select import select_tokens

    grid, total = scored.grid, scored.num_visual_tokens
    ring = torch.ones(grid, dtype=torch.bool)
    ring[:, 1:-1, 1:-1] = False
    rows: list[KeptRow | ScoreRow] = []
    if has_scores:
        assert scored.scores.attention is not None and scored.scores.features is not None
        temporal, spatial = distinctness(scored.scores.features, [grid])
        for title, note, values in (
            ("attention", "what the question looks at", scored.scores.attention),
            ("temporal", "unlike the frame before", temporal),
            ("spatial", "unlike its surroundings", spatial),
        ):
            shown = normalise(values, [grid], "min-max").view(grid).cpu()
            rows.append(ScoreRow(f"score: {title}", (note, "dark: high in its frame"), shown))
    for strategy in strategies:
        kept = torch.zeros(total, dtype=torch.bool)
        kept[select_tokens(Pruning(strategy, ratio), [grid], total, scored.scores).cpu()] = True
        mask = kept.view(grid)
        count = int(mask.sum())
        notes = [f"{count:,} of {total:,} tokens kept"]
        if count:
            notes.append(f"{mask[ring].sum() / count:.0%} at the frames' edge")
            notes.append(f"(of all tokens {ring.float().mean():.0%})")
        rows.append(KeptRow(strategy.value, tuple(notes), mask))
    return rows


def _only(row: KeptRow | ScoreRow, places: Sequence[int]) -> KeptRow | ScoreRow:
    from hippo.cli.picture import KeptRow, ScoreRow

    if isinstance(row, KeptRow):
        return KeptRow(row.title, row.notes, row.kept[list(places)])
    return ScoreRow(row.title, row.notes, row.score[list(places)])


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` places, evenly spaced from the first."""
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
    if not 0.0 <= arguments.ratio <= 0.99:
        raise InvalidRequestError(f"--ratio is {arguments.ratio:g}; it must be 0 to 0.99")
    if arguments.columns < 1:
        raise InvalidRequestError(f"--columns is {arguments.columns}; it must be at least 1")
    if arguments.out.suffix.lower() != ".png":
        raise InvalidRequestError(f"--out is {arguments.out}; its name must end in .png")
    if not arguments.out.parent.is_dir():
        raise InvalidRequestError(f"--out: there is no folder {arguments.out.parent}")


def _score_layers(wanted: int | None, num_layers: int) -> int:
    from hippo.pruning.select import default_score_layers

    if wanted is None:
        return default_score_layers(num_layers)
    if not 1 <= wanted <= num_layers:
        raise InvalidRequestError(f"--score-layers is {wanted}; the model has {num_layers}")
    return wanted


def _read(video: str) -> bytes:
    try:
        return Path(video).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{video} cannot be read: {error.strerror}") from None


def _decode(data: bytes, plan: FramePlan) -> DecodedMedia:
    import asyncio

    from hippo.types import Media, MediaKind
    from hippo.video.decoder import MediaDecoder

    async def decoded() -> DecodedMedia:
        async with MediaDecoder() as decoder:
            return await decoder.decode(Media(MediaKind.VIDEO, data), plan)

    return asyncio.run(decoded())
