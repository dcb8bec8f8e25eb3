"""transformers' own forward and generate, the reference that the adapter is held against."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hippo.models._torchvision import ensure_torchvision
from hippo.models.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart


class Reference:
    """A checkpoint as transformers runs it, in float32."""

    architecture = "Qwen2_5_VLForConditionalGeneration"

    def __init__(self, folder: Path) -> None:
        ensure_torchvision()
        transformers: Any = importlib.import_module("transformers")
        self.model = (
            getattr(transformers, self.architecture)
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        self.processor = transformers.AutoProcessor.from_pretrained(folder)

    def turn(self, content: Sequence[dict[str, Any]]) -> str:
        """The text of one user turn, with what begins an answer."""
        text: str = self.processor.apply_chat_template(
            [{"role": "user", "content": list(content)}], tokenize=False, add_generation_prompt=True
        )
        return text

    def inputs(self, content: Sequence[dict[str, Any]], clips: Sequence[DecodedMedia]) -> Any:
        """What the processor makes of one user turn and its videos."""
        videos: dict[str, Any] = {}
        if clips:
            videos["videos"] = [clip.frames.permute(0, 3, 1, 2) for clip in clips]
            videos["video_metadata"] = [
                {
                    "total_num_frames": len(clip.frames),
                    "fps": clip.sampled_fps,
                    "frames_indices": list(range(len(clip.frames))),
                }
                for clip in clips
            ]
            videos["do_sample_frames"] = False
        text = self.turn(content)
        inputs = self.processor(text=[text], return_tensors="pt", **videos)
        inputs.pop("video_metadata", None)
        return inputs

    def forward(self, inputs: Any) -> torch.Tensor:
        """Logits of every row, ``[length, vocab_size]``; positions computed by transformers."""
        self.model.model.rope_deltas = None
        with torch.no_grad():
            logits: torch.Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits

    def generate(self, inputs: Any, num_tokens: int) -> list[int]:
        """Greedy ids, none of the generation configuration's sampling defaults applied."""
        with torch.no_grad():
            ids = self.model.generate(
                **inputs, max_new_tokens=num_tokens, do_sample=False, repetition_penalty=1.0
            )
        generated: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
        return generated

    def recompute(
        self, prompt: Prompt, kept: torch.Tensor | None, completion: Sequence[int]
    ) -> torch.Tensor:
        """Logits from one forward over the prompt without its dropped tokens, and ``completion``.

        Row 0 is the prompt's last token: ``[1 + len(completion), vocab_size]``. Embeddings and
        positions are cut, and a four-dimensional causal mask is given.
        """
        ids = torch.cat((prompt.input_ids, torch.tensor(completion, dtype=torch.int64)))
        tail = torch.arange(len(completion)) + prompt.next_position
        positions = torch.cat((prompt.positions, tail.expand(len(prompt.positions), -1)), 1)
        cached = torch.ones(len(ids), dtype=torch.bool)
        if kept is not None:
            cached[prompt.visual_indices] = False
            cached[prompt.visual_indices[kept]] = True
        length = int(cached.sum())
        with torch.no_grad():
            output = self.model.model.language_model(
                inputs_embeds=self.embeddings(ids, prompt)[cached][None],
                position_ids=self.position_ids(positions[:, cached]),
                attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
                use_cache=False,
            ).last_hidden_state[0]
            logits: torch.Tensor = self.model.lm_head(output[-1 - len(completion) :])
        return logits

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions ``[axes, length]`` as the language model wants them."""
        return positions[:, None]

    def embeddings(self, ids: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """Of a sequence that begins with the whole prompt: ``[len(ids), hidden_size]``."""
        model = self.model.model
        hidden: torch.Tensor = model.get_input_embeddings()(ids)
        for kind, name, places in (
            ("video", "pixel_values_videos", prompt.visual_indices),
            ("image", "pixel_values", prompt.extras.get("image_indices")),
        ):
            if (pixels := prompt.extras.get(name)) is not None:
                features = getattr(model, f"get_{kind}_features")(
                    pixels, prompt.extras[f"{kind}_grid_thw"], return_dict=True
                )
                hidden[places] = torch.cat(features.pooler_output)
        return hidden


def clip(*, num_frames: int = 6, size: int = 84, fps: float = 2.0, seed: int = 0) -> DecodedMedia:
    """Frames of noise, sampled at ``fps``."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(
        0, 256, (num_frames, size, size, 3), dtype=torch.uint8, generator=generator
    )
    seconds = tuple(index / fps for index in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, frames, seconds, fps)


def image(*, height: int = 56, width: int = 84, seed: int = 0) -> DecodedMedia:
    """A still picture of noise."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8, generator=generator)
    return DecodedMedia(MediaKind.IMAGE, frames, (0.0,), 1.0)


def user(*parts: str | int) -> list[ChatMessage]:
    """One user turn: strings are text, numbers are indices of media."""
    content = tuple(TextPart(p) if isinstance(p, str) else MediaPart(p) for p in parts)
    return [ChatMessage("user", content)]


def prepare(
    model: VideoLanguageModel, messages: Sequence[ChatMessage], *media: DecodedMedia
) -> Prompt:
    """The prompt under the model's own frame limits."""
    return model.prepare(messages, media, FramePlan())


def prefill(
    model: VideoLanguageModel, slot: int, prompt: Prompt, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Runs a whole prefill and gives its logits."""
    *groups, logits = model.prefill(slot, prompt, model.embed_visual(prompt), kept)
    assert all(group is None for group in groups)
    assert logits is not None
    return logits
