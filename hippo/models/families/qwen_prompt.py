"""Prompts of the Qwen-VL families: patches, visual tokens and three-axis positions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hippo.catalog.sizes import IMAGE_TOKENS
from hippo.media.frame_list import MAX_LISTED_S
from hippo.media.resizing import FrameLimits
from hippo.models.interface.base import DecodedMedia
from hippo.models.prompts.builder import PromptBuilder
from hippo.models.prompts.layout import Layout, MediaMark, VisualGrid
from hippo.types import MediaKind

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_TOKEN_TYPES = {MediaKind.IMAGE: 1, MediaKind.VIDEO: 2}  # transformers' mm_token_type_ids
# As in qwen-vl-utils 0.0.14: VIDEO_MIN_TOKEN_NUM and VIDEO_MAX_TOKEN_NUM, and the share of
# MODEL_SEQ_LEN that a video may take.
FRAME_TOKENS = (128, 768)
MAX_VIDEO_TOKENS = int(128_000 * 0.9)
_LONGEST_SECONDS = MAX_LISTED_S  # to its text a frame has room


class QwenPromptBuilder(PromptBuilder):
    """See PromptBuilder; a video's visual tokens are one run."""

    def __init__(self, processor: Any, rope_index: RopeIndex, *, max_context_length: int) -> None:
        marks = {
            MediaKind.IMAGE: self._mark(processor, MediaKind.IMAGE),
            MediaKind.VIDEO: self._mark(processor, MediaKind.VIDEO),
        }
        limits = replace(frame_limits(processor), grid_text_tokens=self.count_grid_text(processor))
        super().__init__(processor, limits, marks, max_context_length=max_context_length)
        self._rope_index = rope_index
        self._cutters = {
            MediaKind.IMAGE: PatchCutter(processor.image_processor),
            MediaKind.VIDEO: PatchCutter(processor.video_processor),
        }

    def _mark(self, processor: Any, kind: MediaKind) -> MediaMark:
        token: str = getattr(processor, f"{kind.value}_token")
        return MediaMark(token, token, getattr(processor, f"{kind.value}_token_id"))

    def count_grid_text(self, processor: Any) -> int:
        """Returns FrameLimits.grid_text_tokens."""
        return 0

    def lay_out(self, media: Sequence[DecodedMedia]) -> Sequence[Layout]:
        """See PromptBuilder.lay_out."""
        return [self._lay_out_item(item) for item in media]

    def _lay_out_item(self, item: DecodedMedia) -> Layout:
        cutter = self._cutters[item.kind]
        patches, grid = cutter.cut_frames(item.frames)
        merged = (grid[0], grid[1] // cutter.merge_size, grid[2] // cutter.merge_size)
        if item.kind is MediaKind.IMAGE:
            return Layout(item.kind, (math.prod(merged),), patches, grid)
        return Layout(item.kind, self.video_pieces(item, merged), patches, grid, merged)

    def video_pieces(self, item: DecodedMedia, grid: VisualGrid) -> tuple[str | int, ...]:
        """Returns Layout.pieces of a video."""
        return (math.prod(grid),)

    def positions(
        self,
        input_ids: torch.Tensor,
        layouts: Sequence[Layout],
        places: Sequence[torch.Tensor],
        media: Sequence[DecodedMedia],
    ) -> torch.Tensor:
        """See PromptBuilder.positions."""
        if not layouts:
            return torch.arange(input_ids.shape[0]).expand(3, -1)
        types = torch.zeros_like(input_ids)
        for layout, there in zip(layouts, places, strict=True):
            types[there] = _TOKEN_TYPES[layout.kind]
        grids = {
            kind: torch.tensor([each.grid for each in layouts if each.kind is kind])
            for kind in MediaKind
        }
        temporal_size = self._processor.video_processor.temporal_patch_size
        videos = [item for item in media if item.kind is MediaKind.VIDEO]
        positions, _ = self._rope_index(
            input_ids=input_ids[None],
            mm_token_type_ids=types[None],
            image_grid_thw=_given(grids[MediaKind.IMAGE]),
            video_grid_thw=_given(grids[MediaKind.VIDEO]),
            second_per_grid_ts=[temporal_size / item.sampled_fps for item in videos] or None,
        )
        return positions[:, 0]


class TimedPromptBuilder(QwenPromptBuilder):
    """See PromptBuilder; each frame of a video (of two sampled ones) is a run behind its time.

        <0.2 seconds><|vision_start|> frame <|vision_end|><1.2 seconds><|vision_start|> frame ...

    This is Qwen3-VL's form as it was released with transformers 4.57. Since 5.12 transformers
    leaves the template's own <|vision_start|> and <|vision_end|> around the whole video.
    """

    def _mark(self, processor: Any, kind: MediaKind) -> MediaMark:
        mark = super()._mark(processor, kind)
        if kind is MediaKind.IMAGE:
            return mark
        placeholder = processor.vision_start_token + mark.token + processor.vision_end_token
        return MediaMark(placeholder, mark.token, mark.token_id)

    def count_grid_text(self, processor: Any) -> int:
        """See QwenPromptBuilder.count_grid_text."""
        text = _time_text(_LONGEST_SECONDS, processor) + processor.vision_end_token
        return len(processor.tokenizer(text)["input_ids"])

    def video_pieces(self, item: DecodedMedia, grid: VisualGrid) -> tuple[str | int, ...]:
        """See QwenPromptBuilder.video_pieces; a time is the mean of the first and last frame's."""
        num_frames, rows, columns = grid
        processor, seconds = self._processor, item.frame_seconds
        depth = math.ceil(len(seconds) / num_frames)
        pieces: list[str | int] = []
        behind = ""
        for first in range(0, len(seconds), depth):
            last = min(first + depth, len(seconds)) - 1
            time = (seconds[first] + seconds[last]) / 2
            pieces += [behind + _time_text(time, processor), rows * columns]
            behind = processor.vision_end_token
        return (*pieces, behind)


def _time_text(seconds: float, processor: Any) -> str:
    text: str = f"<{seconds:.1f} seconds>{processor.vision_start_token}"
    return text


def _given(grids: torch.Tensor) -> torch.Tensor | None:
    return grids if grids.shape[0] else None


def frame_limits(processor: Any) -> FrameLimits:
    """Returns the limits of a checkpoint's processor.

    Its limits for a video's frames apply if the largest is at most the reference's; larger ones are
    the limits for images or whole videos in the files of the public checkpoints, which have no
    others, and the reference's apply. Images have at most IMAGE_TOKENS tokens, for which memory is
    planned.
    """
    video, image = processor.video_processor, processor.image_processor
    side = int(video.patch_size * video.merge_size)
    least, most = int(image.size["shortest_edge"]), int(image.size["longest_edge"])
    pixels = (int(video.size["shortest_edge"]), int(video.size["longest_edge"]))
    reference = (FRAME_TOKENS[0] * side**2, FRAME_TOKENS[1] * side**2)
    return FrameLimits(
        frame_multiple=int(video.temporal_patch_size),
        side_multiple=side,
        video_pixels=pixels if pixels[1] <= reference[1] else reference,
        image_pixels=(least, min(most, IMAGE_TOKENS * side**2)),
        max_video_tokens=MAX_VIDEO_TOKENS,
        resample=int(video.resample),
    )


class PatchCutter:
    """Cuts frames as a given image or video processor of transformers does, to the last bit and in
    a fraction of its time; usable from any thread. The patches stay bytes
    (hippo.models.families.pixels)."""

    def __init__(self, processor: Any) -> None:
        self.merge_size = int(processor.merge_size)
        self._patch = int(processor.patch_size)
        self._depth = int(processor.temporal_patch_size)

    def cut_frames(self, pixels: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Returns the patches (uint8 ``[num_patches, values]``) of ``pixels`` (uint8
        ``[num_frames, height, width, 3]``, resized), and their grid in patches.
        """
        num_frames, height, width, _ = pixels.shape
        if padding := -num_frames % self._depth:
            pixels = torch.cat((pixels, pixels[-1:].expand(padding, -1, -1, -1)))
        grid = (pixels.shape[0] // self._depth, height // self._patch, width // self._patch)
        blocks = pixels.reshape(
            grid[0],
            self._depth,
            grid[1] // self.merge_size,
            self.merge_size,
            self._patch,
            grid[2] // self.merge_size,
            self.merge_size,
            self._patch,
            3,
        )
        # The order is: frames, merged patches, patches in a merged patch; a patch is
        # [channels, frames, rows, columns].
        ordered = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        values = 3 * self._depth * self._patch**2
        return ordered.reshape(grid[0] * grid[1] * grid[2], values), grid
