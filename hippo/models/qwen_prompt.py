"""Prompts of the Qwen2.5-VL family: chat template, processor and three-axis positions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hippo.errors import MediaError
from hippo.models.base import DecodedMedia, Prompt, VisualItem
from hippo.models.content import visual_digest
from hippo.models.messages import (
    check_length,
    media_in_order,
    prompt_hash,
    refuse_placeholders,
    render,
)
from hippo.models.question import question_indices
from hippo.types import ChatMessage, FramePlan, MediaKind

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]

VIDEO_EXTRAS = ("pixel_values_videos", "video_grid_thw")
IMAGE_EXTRAS = ("pixel_values", "image_grid_thw")
_IMAGE_TYPE, _VIDEO_TYPE = 1, 2  # mm_token_type_ids


class PromptBuilder:
    """Turns chat messages and decoded frames into a Prompt; usable from any thread.

    ``extras`` of the prompt: ``pixel_values_videos`` and ``video_grid_thw`` with videos;
    ``pixel_values``, ``image_grid_thw`` and ``image_indices`` (places in ``input_ids``) with
    images.
    """

    def __init__(self, processor: Any, rope_index: RopeIndex, *, max_context_length: int) -> None:
        self._processor = processor
        self._rope_index = rope_index
        self._max_context_length = max_context_length
        self._merge_size = int(processor.video_processor.merge_size)
        self._lock = threading.Lock()  # the tokenizer is not to be entered twice

    def build(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """The prompt of a request; raises as VideoLanguageModel.prepare says."""
        ordered = media_in_order(messages, media)
        videos = [item for item in ordered if item.kind is MediaKind.VIDEO]
        images = [item for item in ordered if item.kind is MediaKind.IMAGE]
        refuse_placeholders(messages, self._processor)
        arguments: dict[str, Any] = {"return_tensors": "pt"}
        if videos:
            arguments["videos"] = [item.frames.permute(0, 3, 1, 2) for item in videos]
            arguments["videos_kwargs"] = {
                "video_metadata": [_metadata(item) for item in videos],
                "do_sample_frames": False,
                **_size(self._processor.video_processor, frame_plan.max_pixels),
            }
        if images:
            arguments["images"] = [item.frames[0].permute(2, 0, 1) for item in images]
            arguments["images_kwargs"] = _size(
                self._processor.image_processor, frame_plan.max_pixels
            )
        with self._lock:
            text = render(self._processor, messages, media)
            try:
                inputs = self._processor(text=[text], **arguments)
            except ValueError as error:
                raise MediaError(f"the model's processor refuses the media: {error}") from error
            check_length(inputs["input_ids"].shape[1], self._max_context_length)
            visual_indices = (inputs["mm_token_type_ids"][0] == _VIDEO_TYPE).nonzero()[:, 0]
            question = question_indices(
                self._processor,
                messages,
                media,
                rendered=text,
                input_ids=inputs["input_ids"][0],
                visual_indices=visual_indices,
            )
        return self._prompt(inputs, visual_indices, question)

    def _prompt(self, inputs: Any, visual_indices: torch.Tensor, question: torch.Tensor) -> Prompt:
        input_ids = inputs["input_ids"]  # [1, length]
        extras = {name: inputs[name] for name in VIDEO_EXTRAS + IMAGE_EXTRAS if name in inputs}
        types = inputs["mm_token_type_ids"][0]
        if extras:
            positions = self._rope_index(
                input_ids,
                mm_token_type_ids=inputs["mm_token_type_ids"],
                image_grid_thw=extras.get("image_grid_thw"),
                video_grid_thw=extras.get("video_grid_thw"),
                second_per_grid_ts=inputs.get("second_per_grid_ts"),
            )[0][:, 0]  # [3, length]
        else:
            positions = torch.arange(input_ids.shape[1]).expand(3, -1)
        items: list[VisualItem] = []
        if "video_grid_thw" in extras:
            items += self._items(MediaKind.VIDEO, extras, visual_indices)
        if "image_grid_thw" in extras:
            extras["image_indices"] = (types == _IMAGE_TYPE).nonzero()[:, 0]
            items += self._items(MediaKind.IMAGE, extras, extras["image_indices"])
        return Prompt(
            input_ids=input_ids[0],
            positions=positions,
            next_position=int(positions.max()) + 1,
            visual_indices=visual_indices,
            visual_grids=tuple(
                (frames, rows // self._merge_size, columns // self._merge_size)
                for frames, rows, columns in inputs.get(
                    "video_grid_thw", torch.empty(0, 3, dtype=torch.int64)
                ).tolist()
            ),
            question_indices=question,
            prompt_hash=prompt_hash(input_ids[0]),
            extras=extras,
            items=tuple(items),
        )

    def _items(
        self, kind: MediaKind, extras: dict[str, torch.Tensor], places: torch.Tensor
    ) -> list[VisualItem]:
        """The videos or the images, whose tokens stand at ``places``."""
        names = VIDEO_EXTRAS if kind is MediaKind.VIDEO else IMAGE_EXTRAS
        pixels, grids = (extras[name] for name in names)
        patches = split_patches(pixels, grids)
        lengths = [one.shape[0] // self._merge_size**2 for one in patches]
        return [
            VisualItem(visual_digest(kind, one, (tuple(grid),)), there)
            for one, grid, there in zip(
                patches, grids.tolist(), torch.split(places, lengths), strict=True
            )
        ]


def split_patches(pixels: torch.Tensor, grids: torch.Tensor) -> Sequence[torch.Tensor]:
    """The patches (``[num_patches, values]``) of each item; ``grids`` is ``[num_items, 3]``."""
    return torch.split(pixels, grids.prod(1).tolist())


def _metadata(item: DecodedMedia) -> dict[str, Any]:
    # The frames are already sampled: seen from the processor, the clip has these frames only.
    num_frames = int(item.frames.shape[0])
    return {
        "total_num_frames": num_frames,
        "fps": item.sampled_fps,
        "frames_indices": list(range(num_frames)),
        "duration": num_frames / item.sampled_fps,
    }


def _size(processor: Any, max_pixels: int) -> dict[str, Any]:
    """The processor's size limits under a request's cap on pixels; empty without one."""
    if max_pixels <= 0:
        return {}
    smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
    return {
        "size": {
            "shortest_edge": min(smallest, max_pixels),
            "longest_edge": min(largest, max_pixels),
        }
    }
