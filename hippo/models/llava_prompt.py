"""Prompts of the LLaVA-OneVision family: the processor's inputs and the pooled video grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hippo.models.base import DecodedMedia, Prompt, VisualItem
from hippo.models.content import visual_digest
from hippo.models.messages import prompt_hash
from hippo.models.pixels import byte_options
from hippo.models.prompts import PromptBuilder
from hippo.models.question import NO_QUESTION
from hippo.types import MediaKind
from hippo.video.resizing import FrameLimits

_NUM_FRAMES = 32  # of the family's training and evaluation


class LlavaPromptBuilder(PromptBuilder):
    """See PromptBuilder.

    A video consists of its frames' pooled grids, one after the other, and one newline token, which
    is not prunable:

        video   |- frame 0, row by row -|- frame 1 -| ... |- last frame -|newline|
                ^ visual_indices ................................ end ^

    The prompt's ``extras`` are, with videos, ``pixel_values_videos`` (``[num_frames, 3, height,
    width]``, the videos concatenated) and ``newline_indices`` (into ``input_ids``); with images,
    ``pixel_values``, ``image_sizes``, ``batch_num_images`` and ``image_indices``. A single image is
    cut into tiles and several images are not, as in the family's training.
    """

    def __init__(self, processor: Any, *, max_context_length: int) -> None:
        # Pooling halves the sides of the tower's square grid, rounding up.
        self._side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        video = processor.video_processor
        size = dict(video.size)  # LlavaTower refuses another one than the tower's
        limits = FrameLimits(
            num_frames=_NUM_FRAMES,
            frame_multiple=1,
            fixed_size=(size.get("height", 0), size.get("width", 0)),
            fixed_tokens=self._side**2,
            resample=int(video.resample),
        )
        super().__init__(processor, limits, max_context_length=max_context_length)

    def process_inputs(self, text: str, media: Sequence[DecodedMedia]) -> Prompt:
        """See PromptBuilder.process_inputs."""
        videos = [item for item in media if item.kind is MediaKind.VIDEO]
        images = [item for item in media if item.kind is MediaKind.IMAGE]
        arguments: dict[str, Any] = {}
        if videos:
            arguments["videos"] = [item.frames.permute(0, 3, 1, 2) for item in videos]
            arguments["videos_kwargs"] = {
                "do_sample_frames": False,
                **byte_options(self._processor.video_processor),
            }
        if images:  # nested: one list of images for each prompt
            arguments["images"] = [[item.frames[0].permute(2, 0, 1) for item in images]]
            arguments["images_kwargs"] = byte_options(self._processor.image_processor)
        inputs = self._processor(text=[text], **arguments)
        input_ids = torch.tensor(inputs["input_ids"][0])
        frames = inputs.get("pixel_values_videos", [])  # [frames, 3, height, width] each
        grids = tuple((int(one.shape[0]), self._side, self._side) for one in frames)
        visual_indices, newline_indices = self._video_places(input_ids, grids)
        extras: dict[str, torch.Tensor] = {}
        if videos:
            extras["pixel_values_videos"] = torch.cat(list(frames))
            extras["newline_indices"] = newline_indices
        if images:
            extras["pixel_values"] = torch.stack(list(inputs["pixel_values"]))
            extras["image_sizes"] = torch.tensor(inputs["image_sizes"])
            extras["batch_num_images"] = torch.tensor(inputs["batch_num_images"])
            extras["image_indices"] = (input_ids == self._processor.image_token_id).nonzero()[:, 0]
        return Prompt(
            input_ids=input_ids,
            positions=torch.arange(input_ids.shape[0])[None],
            next_position=input_ids.shape[0],
            visual_indices=visual_indices,
            visual_grids=grids,
            question_indices=NO_QUESTION,
            prompt_hash=prompt_hash(input_ids),
            extras=extras,
            items=(*_video_items(extras, grids, visual_indices), *_image_items(extras)),
        )

    def _video_places(
        self, input_ids: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices of the grids' tokens and of the newlines, one for each video."""
        places = (input_ids == self._processor.video_token_id).nonzero()[:, 0]
        lengths = torch.tensor([math.prod(grid) + 1 for grid in grids], dtype=torch.int64)
        is_newline = torch.zeros(places.shape[0], dtype=torch.bool)
        is_newline[lengths.cumsum(0) - 1] = True
        return places[~is_newline], places[is_newline]


def split_frames(
    extras: Mapping[str, torch.Tensor], grids: Sequence[tuple[int, int, int]]
) -> Sequence[torch.Tensor]:
    """Returns the frames of each video: ``[num_frames, 3, height, width]``."""
    return torch.split(extras["pixel_values_videos"], [num_frames for num_frames, _, _ in grids])


def _video_items(
    extras: Mapping[str, torch.Tensor], grids: Sequence[tuple[int, int, int]], places: torch.Tensor
) -> list[VisualItem]:
    if not grids:
        return []
    return [
        VisualItem(visual_digest(MediaKind.VIDEO, frames, ()), there)
        for frames, there in zip(
            split_frames(extras, grids),
            torch.split(places, [math.prod(grid) for grid in grids]),
            strict=True,
        )
    ]


def _image_items(extras: Mapping[str, torch.Tensor]) -> list[VisualItem]:
    """Several images have equal numbers of tokens, because none is cut into tiles: the tower gets
    the first patch of each, which is the whole image."""
    if "pixel_values" not in extras:
        return []
    pixels, sizes = extras["pixel_values"], extras["image_sizes"].tolist()
    is_tiled = len(sizes) == 1
    places = extras["image_indices"].view(len(sizes), -1)
    return [
        VisualItem(
            visual_digest(MediaKind.IMAGE, one if is_tiled else one[:1], (tuple(size), is_tiled)),
            there,
        )
        for one, size, there in zip(pixels, sizes, places, strict=True)
    ]
