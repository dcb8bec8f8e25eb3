"""What a model family says of itself: its prompts, its vision tower and its description."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hippo.catalog.sizes import CPU_VISION_PATCHES, VISION_PATCHES
from hippo.errors import ModelLoadError
from hippo.media.resizing import FrameLimits
from hippo.models.families.pixels import PixelScale
from hippo.models.interface.base import Prompt, VisualItem
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.models.prompts.builder import PromptBuilder
from hippo.types import MediaKind


class VisionTower(ABC):
    """A family's vision tower; the constructor replaces modules of the loaded model in place."""

    def __init__(self, pretrained: Pretrained) -> None:
        self.model: Any = pretrained.model.model
        self._embedding: torch.Tensor = pretrained.model.get_input_embeddings().weight
        processor, device = pretrained.processor, self._embedding.device
        self._scales = {
            MediaKind.VIDEO: PixelScale(processor.video_processor, device),
            MediaKind.IMAGE: PixelScale(processor.image_processor, device),
        }

    @abstractmethod
    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """Computes the features of an item part by part: ``[tokens, width]``, as embed_visual."""

    def embed_others(self, prompt: Prompt) -> Sequence[torch.Tensor]:
        """Returns the visual rows (``[rows, width]`` each) that belong to no item: separators."""
        return ()

    def pictures_at_once(self, num_patches: int) -> int:
        """Returns how many pictures of ``num_patches`` patches each run at once."""
        most = CPU_VISION_PATCHES if self._embedding.device.type == "cpu" else VISION_PATCHES
        return max(1, most // num_patches)

    def on_device(self, pixels: torch.Tensor, kind: MediaKind) -> torch.Tensor:
        """Copies pixels to the model's device and normalises them there, in the model's dtype."""
        there = to_device(pixels, self._embedding.device)
        return self._scales[kind].normalise(there).to(self._embedding.dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """The parts that are particular to a model family with a language model of Qwen2's or Qwen3's
    layers.

    ``check_configuration`` raises ModelLoadError for an unsupported checkpoint or plan before the
    weights are read; ``make_tower`` may raise ModelLoadError after that.
    """

    title: str  # for readers
    architecture: str  # name of the class in transformers
    num_axes: int  # axes of a position
    make_prompts: Callable[[Pretrained], PromptBuilder]
    make_tower: Callable[[Pretrained], VisionTower]
    video_tokens: str  # what the tokens of a video are, for readers
    check_configuration: Callable[[Checkpoint, LoadPlan], None] | None = None


def require(
    title: str, languages: Sequence[str], settings: Mapping[str, object]
) -> Callable[[Checkpoint, LoadPlan], None]:
    """Returns Family.check_configuration of a family whose frames have one size: it takes only
    language models of some ``model_type`` and some values of settings, and no limits of pixels."""

    def check(checkpoint: Checkpoint, plan: LoadPlan) -> None:
        plan.refuse_pixel_limits(checkpoint.name)
        language = (checkpoint.config.get("text_config") or {}).get("model_type", "qwen2")
        if language not in languages:
            raise ModelLoadError(
                f"{checkpoint.name}: its language model is a {language!r}; {title} is supported "
                f"with {' or '.join(map(repr, languages))}"
            )
        for name, supported in settings.items():
            value = checkpoint.config.get(name, supported)
            if value != supported:
                raise ModelLoadError(
                    f"{checkpoint.name}: {name} {value!r} is not supported, only {supported!r}"
                )

    return check


def check_pictures(
    pretrained: Pretrained, made: Mapping[str, Any], size: tuple[int, int], counted: tuple[str, int]
) -> None:
    """Raises ModelLoadError if the processor's pictures or token counts do not fit the tower.

    ``made`` are its image or video processors by what they make, ``size`` is a picture's height and
    width in the tower, and ``counted`` are the processor's setting for the tokens of a frame and
    the tower's number.
    """
    name, (height, width), (setting, num_tokens) = pretrained.info.name, size, counted
    for pictures, processor in made.items():
        own = dict(processor.size)
        if height != width or (own.get("height"), own.get("width")) != size:
            raise ModelLoadError(
                f"{name}: its processor makes {pictures} of size {own}, its vision tower takes "
                f"{width} x {height} pixels; both must be the same square"
            )
    if (found := getattr(pretrained.processor, setting)) != num_tokens:
        raise ModelLoadError(
            f"{name}: its processor counts {found} tokens a frame ({setting}), its vision tower "
            f"gives {num_tokens}"
        )


def picture_limits(processor: Any, *, num_frames: int, num_tokens: int) -> FrameLimits:
    """Returns the limits of a family whose frames have the video processor's size."""
    video = processor.video_processor
    size = dict(video.size)  # check_pictures refuses another size than the tower's
    return FrameLimits(
        num_frames=num_frames,
        frame_multiple=1,
        fixed_size=(size.get("height", 0), size.get("width", 0)),
        fixed_tokens=num_tokens,
        resample=int(video.resample),
    )
