"""Pixels as bytes until they are on the vision tower's device.

A processor of transformers rescales and normalises pixels to float32, which takes four times the
memory of the resized bytes in the host and in the copy to the device. Prompts therefore hold bytes
(uint8), and the tower's device converts them part by part, by the processor's own formula. Both
operations are IEEE float32, so the result is the processor's to the last bit.
"""

from typing import Any

import torch


def byte_options(processor: Any) -> dict[str, bool]:
    """Returns the options with which an image or video processor gives bytes; none for a processor
    that does not both rescale and normalise, whose floating-point pixels are used as they are."""
    if not (processor.do_rescale and processor.do_normalize):
        return {}
    return {"do_rescale": False, "do_normalize": False}


class PixelScale:
    """Converts the bytes of one image or video processor to what its vision tower takes."""

    def __init__(self, processor: Any, device: torch.device | None = None) -> None:
        # As transformers' _fuse_mean_std_and_rescale_factor computes them.
        scale = 1.0 / processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = processor.image_mean, processor.image_std
        if not processor.do_normalize:
            mean, std = [0.0] * 3, [1.0] * 3
        self._mean = (torch.tensor(mean) * scale).to(device)[:, None, None]
        self._std = (torch.tensor(std) * scale).to(device)[:, None, None]

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns uint8 pixels as float32; floating-point pixels, which the processor has
        normalised, are returned unchanged.

        The shape is ``[..., 3, height, width]``, or ``[patches, values]`` with the values of a
        patch ordered by channel.
        """
        if pixels.is_floating_point():
            return pixels
        by_channel = pixels.view(-1, 3, 1, pixels.shape[1] // 3) if pixels.dim() == 2 else pixels
        return by_channel.float().sub_(self._mean).div_(self._std).view(pixels.shape)
