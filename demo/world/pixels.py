"""Patches of frames for the vision tower, and augmentation that imitates a video codec.

The patches equal the patches of the checkpoint's video processor.
"""

import numpy as np
import torch
from torch import Tensor

from demo.world.scenes import FrameArray

PATCH = 14
MERGE = 2
TEMPORAL_PATCH = 2
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def patchify(frames: Tensor) -> Tensor:
    """Returns normalised patches of equally sized clips, in the processor's order.

    frames: [batch, num_frames, height, width, 3] uint8, num_frames even, sides multiples of 28.
    The patches are float32 [batch, num_frames / 2, patches_per_frame, 1176]; four consecutive
    patches merge into one token.
    """
    batch, num_frames, height, width, channels = frames.shape
    grid_t = num_frames // TEMPORAL_PATCH
    rows, cols = height // (PATCH * MERGE), width // (PATCH * MERGE)
    scale = torch.tensor([1.0 / (255.0 * std) for std in STD])
    shift = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)])
    values = frames.float() * scale + shift
    values = values.view(
        batch, grid_t, TEMPORAL_PATCH, rows, MERGE, PATCH, cols, MERGE, PATCH, channels
    )
    values = values.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return values.reshape(
        batch, grid_t, rows * cols * MERGE * MERGE, channels * TEMPORAL_PATCH * PATCH * PATCH
    )


def augment(frames: FrameArray, rng: np.random.Generator) -> FrameArray:
    """Returns frames with codec-like damage: half chroma resolution, blur, noise, brightness.

    frames: [num_frames, height, width, 3], even sides.
    """
    kind = rng.random()
    if kind < 0.25:
        return frames
    values = frames.astype(np.float32)
    if kind < 0.75:
        luma = values @ np.array([0.299, 0.587, 0.114], np.float32)
        chroma = values - luma[..., None]
        count, height, width, _ = chroma.shape
        coarse = chroma.reshape(count, height // 2, 2, width // 2, 2, 3).mean(axis=(2, 4))
        if rng.random() < 0.5:
            luma[:, 1:-1] = 0.2 * luma[:, :-2] + 0.6 * luma[:, 1:-1] + 0.2 * luma[:, 2:]
            luma[:, :, 1:-1] = 0.2 * luma[:, :, :-2] + 0.6 * luma[:, :, 1:-1] + 0.2 * luma[:, :, 2:]
        values = luma[..., None] + coarse.repeat(2, axis=1).repeat(2, axis=2)
    values += rng.uniform(-5, 5)
    noise = rng.normal(0.0, rng.uniform(0.5, 4.0), (1, *values.shape[1:])).astype(np.float32)
    values += noise
    return np.asarray(np.clip(values + 0.5, 0, 255), np.uint8)
