"""Scores the visual tokens of a clip with a target, for ``hippo inspect``. Needs torch."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hippo.errors import InvalidRequestError
from hippo.lab.commands.picture import PictureRow
from hippo.media.resizing import FrameLimits
from hippo.models.interface.base import (
    AttentionTap,
    DecodedMedia,
    VideoLanguageModel,
    prunable_embeddings,
)
from hippo.pruning.scores import distinctness, normalise
from hippo.pruning.select import VisualScores, default_score_layers, select_tokens
from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, Pruning, TextPart
from hippo.video.decoder import MediaDecoder


@dataclass(frozen=True, slots=True)
class Scored:
    """The grid of a prompt's visual tokens, with the attention and features of the target."""

    grid: tuple[int, int, int]  # frames, rows, columns
    attention: torch.Tensor  # [num_visual_tokens], mean over the tapped layers
    features: torch.Tensor  # [num_visual_tokens, hidden]
    alignment: torch.Tensor | None  # [num_visual_tokens], its change over the tapped layers
    is_question_first: bool  # in the prompt; the chat template may change the order

    @property
    def num_visual_tokens(self) -> int:
        """The number of tokens in the grid."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def score_rows(self) -> Iterator[PictureRow]:
        """Yields a row of the picture for each score, over the whole grid."""
        temporal, spatial = distinctness(self.features, [self.grid])
        for title, note, values in (
            ("attention", "what the question looks at", self.attention),
            ("temporal", "unlike the frame before", temporal),
            ("spatial", "unlike its surroundings", spatial),
        ):
            shown = normalise(values, [self.grid]).view(self.grid).cpu()
            yield PictureRow(f"score: {title}", (note, "dark: high in its frame"), shown)

    def kept_row(self, pruning: Pruning) -> PictureRow:
        """Returns a row of the picture with the tokens that ``pruning`` keeps."""
        total = self.num_visual_tokens
        scores = VisualScores(self.attention, self.features, self.alignment)
        kept = torch.zeros(total, dtype=torch.bool)
        kept[select_tokens(pruning, [self.grid], total, scores).cpu()] = True
        mask = kept.view(self.grid)
        ring = torch.ones(self.grid, dtype=torch.bool)
        ring[:, 1:-1, 1:-1] = False
        count = int(mask.sum())
        notes = [f"{count:,} of {total:,} tokens kept"]
        if count:
            notes.append(f"{mask[ring].sum() / count:.0%} at the frames' edge")
            notes.append(f"(of all tokens {ring.float().mean():.0%})")
        return PictureRow(pruning.strategy.value, tuple(notes), mask)


def decode(data: bytes, plan: FramePlan, frame_limits: FrameLimits | None = None) -> DecodedMedia:
    """Returns the frames of a video file, resized for a model of these limits. Raises HippoError if
    ``data`` is not a video."""

    async def decoded() -> DecodedMedia:
        async with MediaDecoder() as decoder:
            decoder.frame_limits = frame_limits or decoder.frame_limits
            return await decoder.decode(Media(MediaKind.VIDEO, data), plan)

    return asyncio.run(decoded())


def score(
    model: VideoLanguageModel,
    clip: DecodedMedia,
    question: str,
    *,
    is_video_first: bool,
    num_layers: int,
    has_alignment: bool,
) -> Scored:
    """Runs the vision tower and the first ``num_layers`` layers of the prefill of slot 0, and with
    ``has_alignment`` these layers again for the alignment.

    Raises InvalidRequestError if the clip has no visual tokens to prune, as an image has none.
    """
    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart(question))
    message = ChatMessage("user", parts if is_video_first else parts[::-1])
    prompt = model.prepare_prompt([message], [clip], FramePlan())
    if not prompt.visual_grids:
        raise InvalidRequestError("there are no visual tokens to prune: give a video")
    visual = model.embed_visual(prompt)
    assert visual is not None

    def scored(tap: AttentionTap) -> torch.Tensor:
        prefill = model.prefill(0, prompt, visual, None, tap)
        while tap.scores is None:
            next(prefill)
        prefill.close()
        return tap.scores

    return Scored(
        prompt.visual_grids[0],
        scored(AttentionTap(num_layers)),
        prunable_embeddings(model, prompt, visual),
        scored(AttentionTap(num_layers, is_alignment=True)) if has_alignment else None,
        is_question_first=bool(prompt.question_indices[0] < prompt.visual_indices[0]),
    )


def score_layers(wanted: int | None, num_layers: int, *, has_alignment: bool) -> int:
    """Returns the number of layers to tap: ``wanted``, or the default.

    Raises InvalidRequestError unless it is 1 to ``num_layers``, or less with alignment, because a
    prefill computes the last layer's output for the last token only.
    """
    if wanted is None:
        wanted = default_score_layers(num_layers)
    if not 1 <= wanted <= num_layers:
        raise InvalidRequestError(f"--score-layers is {wanted}; the model has {num_layers}")
    if has_alignment and wanted == num_layers:
        raise InvalidRequestError(
            f"uv scores by at most {num_layers - 1} of the {num_layers} layers; "
            f"{wanted} are asked for (--score-layers)"
        )
    return wanted
