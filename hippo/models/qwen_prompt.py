"""Prompts of the Qwen2.5-VL family: the processor's inputs and three-axis positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hippo.models.base import DecodedMedia, Prompt, VisualItem
from hippo.models.content import visual_digest
from hippo.models.messages import prompt_hash
from hippo.models.pixels import byte_options
from hippo.models.prompts import PromptBuilder
from hippo.models.question import NO_QUESTION
from hippo.models.qwen_pixels import fast_patches
from hippo.types import MediaKind
from hippo.video.resizing import FrameLimits

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]

VIDEO_EXTRAS = ("pixel_values_videos", "video_grid_thw")
IMAGE_EXTRAS = ("pixel_values", "image_grid_thw")
_IMAGE_TYPE, _VIDEO_TYPE = 1, 2  # mm_token_type_ids
# Of qwen-vl-utils 0.0.14: VIDEO_MIN_PIXELS and VIDEO_MAX_PIXELS of a frame, and VIDEO_TOTAL_PIXELS
# of a video as tokens.
_VIDEO_PIXELS = (128 * 28 * 28, 768 * 28 * 28)
_MAX_VIDEO_TOKENS = int(128_000 * 0.9)


class QwenPromptBuilder(PromptBuilder):
    """See PromptBuilder.

    The prompt's ``extras`` are ``pixel_values_videos`` and ``video_grid_thw`` with videos, and
    ``pixel_values``, ``image_grid_thw`` and ``image_indices`` (into ``input_ids``) with images.
    """

    def __init__(self, processor: Any, rope_index: RopeIndex, *, max_context_length: int) -> None:
        super().__init__(processor, frame_limits(processor), max_context_length=max_context_length)
        self._rope_index = rope_index
        self._merge_size = int(processor.video_processor.merge_size)
        self._patches = fast_patches(processor.video_processor)

    def process_inputs(self, text: str, media: Sequence[DecodedMedia]) -> Prompt:
        """See PromptBuilder.process_inputs."""
        inputs = self._assembled(text, media)
        if inputs is None:
            inputs = self._processed(text, media)
        input_ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]  # [1, length]
        extras = {name: inputs[name] for name in VIDEO_EXTRAS + IMAGE_EXTRAS if name in inputs}
        positions = torch.arange(input_ids.shape[1]).expand(3, -1)
        if extras:
            positions = self._rope_index(
                input_ids,
                mm_token_type_ids=types,
                image_grid_thw=extras.get("image_grid_thw"),
                video_grid_thw=extras.get("video_grid_thw"),
                second_per_grid_ts=inputs.get("second_per_grid_ts"),
            )[0][:, 0]
        visual_indices = (types[0] == _VIDEO_TYPE).nonzero()[:, 0]
        visual_grids: list[list[int]] = []
        items: list[VisualItem] = []
        if "video_grid_thw" in extras:
            visual_grids = extras["video_grid_thw"].tolist()
            items += self._items(MediaKind.VIDEO, extras, visual_indices)
        if "image_grid_thw" in extras:
            extras["image_indices"] = (types[0] == _IMAGE_TYPE).nonzero()[:, 0]
            items += self._items(MediaKind.IMAGE, extras, extras["image_indices"])
        return Prompt(
            input_ids=input_ids[0],
            positions=positions,
            next_position=int(positions.max()) + 1,
            visual_indices=visual_indices,
            visual_grids=tuple(
                (frames, rows // self._merge_size, columns // self._merge_size)
                for frames, rows, columns in visual_grids
            ),
            question_indices=NO_QUESTION,
            prompt_hash=prompt_hash(input_ids[0]),
            extras=extras,
            items=tuple(items),
        )

    def _processed(self, text: str, media: Sequence[DecodedMedia]) -> Mapping[str, Any]:
        """Runs the processor on a rendered prompt."""
        videos = [item for item in media if item.kind is MediaKind.VIDEO]
        images = [item for item in media if item.kind is MediaKind.IMAGE]
        arguments: dict[str, Any] = {"return_tensors": "pt"}
        if videos:
            arguments["videos"] = [item.frames.permute(0, 3, 1, 2) for item in videos]
            arguments["videos_kwargs"] = {
                "video_metadata": [_metadata(item) for item in videos],
                "do_sample_frames": False,
                "do_resize": False,
                **byte_options(self._processor.video_processor),
            }
        if images:
            arguments["images"] = [item.frames[0].permute(2, 0, 1) for item in images]
            arguments["images_kwargs"] = {
                "do_resize": False,
                **byte_options(self._processor.image_processor),
            }
        return dict(self._processor(text=[text], **arguments))

    def _assembled(self, text: str, media: Sequence[DecodedMedia]) -> Mapping[str, Any] | None:
        """Makes the processor's output without the processor; None if there are images or this
        class cannot."""
        if self._patches is None or any(item.kind is not MediaKind.VIDEO for item in media):
            return None
        processor = self._processor
        encoded = torch.tensor(processor.tokenizer(text)["input_ids"])
        is_video = encoded == processor.video_token_id
        if int(is_video.sum()) != len(media):
            return None
        cut = [self._patches.cut_frames(item.frames) for item in media]
        repeats = torch.ones_like(encoded)
        repeats[is_video] = torch.tensor(
            [patches.shape[0] // self._merge_size**2 for patches, _ in cut], dtype=torch.int64
        )
        ids = encoded.repeat_interleave(repeats)[None]
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "mm_token_type_ids": (ids == processor.video_token_id) * _VIDEO_TYPE,
        }
        if media:
            patches = [each for each, _ in cut]
            inputs["pixel_values_videos"] = patches[0] if len(cut) == 1 else torch.cat(patches)
            inputs["video_grid_thw"] = torch.tensor([grid for _, grid in cut])
            temporal_size = processor.video_processor.temporal_patch_size
            inputs["second_per_grid_ts"] = [temporal_size / item.sampled_fps for item in media]
        return inputs

    def _items(
        self,
        kind: MediaKind,
        extras: dict[str, torch.Tensor],
        places: torch.Tensor,
    ) -> list[VisualItem]:
        """Returns the items of one kind, whose tokens are at ``places`` in ``input_ids``."""
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
    """Splits patches by item: ``[num_patches, values]`` each; ``grids`` is ``[num_items, 3]``."""
    return torch.split(pixels, grids.prod(1).tolist())


def _metadata(item: DecodedMedia) -> dict[str, Any]:
    # The frames are sampled already: for the processor the clip has only these frames.
    num_frames = int(item.frames.shape[0])
    return {
        "total_num_frames": num_frames,
        "fps": item.sampled_fps,
        "frames_indices": list(range(num_frames)),
        "duration": num_frames / item.sampled_fps,
    }


def frame_limits(processor: Any) -> FrameLimits:
    """Returns the limits of a checkpoint's processor.

    Its limits for a video's frames apply if the largest is at most the reference's; larger ones are
    the limits for images in the files of the public checkpoints, which have no others, and the
    reference's apply.
    """
    video, image = processor.video_processor, processor.image_processor
    pixels = (int(video.size["shortest_edge"]), int(video.size["longest_edge"]))
    return FrameLimits(
        frame_multiple=int(video.temporal_patch_size),
        side_multiple=int(video.patch_size * video.merge_size),
        video_pixels=pixels if pixels[1] <= _VIDEO_PIXELS[1] else _VIDEO_PIXELS,
        image_pixels=(int(image.size["shortest_edge"]), int(image.size["longest_edge"])),
        max_video_tokens=_MAX_VIDEO_TOKENS,
        resample=int(video.resample),
    )
