"""Writes a trained model as a standard Hugging Face folder."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo.training.models import SpecialIds
from demo.world import pixels
from hippo.models.loading._torchvision import ensure_torchvision

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

MODELS = Path(__file__).resolve().parents[1] / "models"
FRAMES_PER_SECOND = 2.0
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 768


def export(
    model: "nn.Module", tokenizer: "PreTrainedTokenizerBase", ids: SpecialIds, folder: Path
) -> None:
    """Write weights (bfloat16), configurations, tokenizer, processors and chat template."""
    ensure_torchvision()
    hf: Any = import_module("transformers")

    folder.mkdir(parents=True, exist_ok=True)
    inner: Any = model
    copy: Any = type(inner)(inner.config).to(torch.bfloat16)
    copy.load_state_dict(inner.state_dict())
    copy.generation_config = hf.GenerationConfig(
        do_sample=False, eos_token_id=[ids.im_end, ids.end_of_text], pad_token_id=ids.end_of_text
    )
    copy.save_pretrained(str(folder))
    settings: dict[str, Any] = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": pixels.PATCH,
        "image_mean": list(pixels.MEAN),
        "image_std": list(pixels.STD),
    }
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(
            **settings, do_sample_frames=True, fps=FRAMES_PER_SECOND, cap_pixels_per_frame=False
        ),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(str(folder))
