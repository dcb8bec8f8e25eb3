"""transformers' own forward, the reference that the adapter is held against."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hippo.models.interface.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
    VisualItem,
)
from hippo.models.loading.resolve import import_transformers
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart


class Reference:
    """A checkpoint of any family as transformers runs it, in float32."""

    def __init__(self, folder: Path) -> None:
        transformers = import_transformers()
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self._is_qwen = self.model.config.model_type.startswith("qwen")

    def inputs(self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia]) -> Any:
        """What the processor makes of a conversation; LLaVA-OneVision's videos must have as many
        frames each."""
        turns = [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text}
                    if isinstance(part, TextPart)
                    else {"type": media[part.media_index].kind.value}
                    for part in message.content
                ],
            }
            for message in messages
        ]
        text = self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if self.model.config.model_type.startswith("qwen3"):  # see TimedPromptBuilder
            token = self.processor.video_token
            text = text.replace(f"<|vision_start|>{token}<|vision_end|>", token)
        videos = [item for item in media if item.kind is MediaKind.VIDEO]
        images = [item.frames[0].permute(2, 0, 1) for item in media if item.kind is MediaKind.IMAGE]
        arguments: dict[str, Any] = {}
        if videos:
            arguments["videos"] = [item.frames.permute(0, 3, 1, 2) for item in videos]
        if videos and self._is_qwen:
            counts = [len(clip.frames) for clip in videos]
            arguments["videos_kwargs"] = {
                "video_metadata": [
                    {"total_num_frames": n, "fps": clip.sampled_fps, "frames_indices": [*range(n)]}
                    for n, clip in zip(counts, videos, strict=True)
                ],
                "do_sample_frames": False,
                "size": self._video_size(counts[0]),
            }
        if images:
            arguments["images"] = images if self._is_qwen else [images]
        inputs = self.processor(text=[text], return_tensors="pt", **arguments)
        inputs.pop("video_metadata", None)
        return inputs

    def _video_size(self, num_frames: int) -> dict[str, int]:
        """The file's limits, or qwen-vl-utils' if the file's are not those of a frame; of all
        frames for Qwen3-VL, whose processor takes them so."""
        processor = self.processor.video_processor
        token = (processor.patch_size * processor.merge_size) ** 2
        limits = dict(processor.size)
        if limits["longest_edge"] > 768 * token:
            limits = {"shortest_edge": 128 * token, "longest_edge": 768 * token}
        if self.model.config.model_type.startswith("qwen3"):
            limits = {edge: pixels * num_frames for edge, pixels in limits.items()}
        return limits

    def forward(self, inputs: Any, completion: Sequence[int] = ()) -> torch.Tensor:
        """Logits of every row of the prompt and of ``completion`` behind it, ``[length,
        vocab_size]``; positions computed by transformers."""
        self.model.model.rope_deltas = None
        ids = torch.tensor([completion], dtype=torch.int64)
        tails = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.zeros_like(ids),
        }
        longer = {
            name: torch.cat((inputs[name], tail), 1)
            for name, tail in tails.items()
            if name in inputs
        }
        with torch.no_grad():
            logits: torch.Tensor = self.model(**{**inputs, **longer}, use_cache=False).logits[0]
        return logits

    def recompute(
        self, prompt: Prompt, kept: torch.Tensor | None, completion: Sequence[int]
    ) -> torch.Tensor:
        """Logits from one forward over the prompt without its dropped tokens, and ``completion``.

        Row 0 is the prompt's last token: ``[1 + len(completion), vocab_size]``. Embeddings are
        transformers' own for the whole prompt; then embeddings and positions are cut, and a
        four-dimensional causal mask is given.
        """
        model = self.model.model
        ids = torch.cat((prompt.input_ids, torch.tensor(completion, dtype=torch.int64)))
        with torch.no_grad():
            hidden = model.get_input_embeddings()(ids)
            width = hidden.shape[1]
            visual = torch.zeros(len(ids), dtype=torch.bool)
            features = hidden.new_zeros(0, width)
            places = torch.cat((prompt.visual_indices, prompt.other_indices))
            if prompt.items:
                features = self._features(prompt)
                hidden[places] = features[:, :width]
                visual[places] = True
            tail = torch.arange(len(completion)) + prompt.next_position
            num_axes = prompt.positions.shape[0]
            positions = torch.cat((prompt.positions, tail.expand(num_axes, -1)), 1)
            cached = torch.ones(len(ids), dtype=torch.bool)
            if kept is not None:
                cached[prompt.visual_indices] = False
                cached[prompt.visual_indices[kept]] = True
            length = int(cached.sum())
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            deepstack: dict[str, Any] = {}
            if features.shape[1] > width:
                rows = torch.zeros(len(ids), features.shape[1])
                rows[places] = features
                parts = torch.split(rows[visual & cached, width:], width, 1)
                deepstack = {
                    "visual_pos_masks": visual[cached][None],
                    "deepstack_visual_embeds": list(parts),
                }
            output = model.language_model(
                inputs_embeds=hidden[cached][None],
                position_ids=positions[:, None, cached] if num_axes > 1 else positions[:, cached],
                attention_mask=mask,
                use_cache=False,
                **deepstack,
            ).last_hidden_state[0]
            logits: torch.Tensor = self.model.lm_head(output[-1 - len(completion) :])
        return logits

    def _features(self, prompt: Prompt) -> torch.Tensor:
        """The rows of embed_visual by transformers' own tower: items, then newlines."""
        features = [self._item_features(item) for item in prompt.items]
        newlines = [rows[-1:] for rows in features[: len(prompt.visual_grids)]]
        if self.model.config.model_type == "llava_onevision":
            videos = [rows[:-1] for rows in features[: len(newlines)]]
            features = [*videos, *features[len(newlines) :], *newlines]
        return torch.cat(features)

    def _item_features(self, item: VisualItem) -> torch.Tensor:
        model, processor = self.model.model, self.processor
        is_video = item.kind is MediaKind.VIDEO
        assert item.pixels is not None
        own = processor.video_processor if is_video else processor.image_processor
        pixels = normalised(own, item.pixels)
        if self._is_qwen:
            embed = model.get_video_features if is_video else model.get_image_features
            output = embed(pixels, torch.tensor([item.grid]), return_dict=True)
            deepstack = [each[0] for each in getattr(output, "deepstack_features", None) or ()]
            return torch.cat((output.pooler_output[0], *deepstack), 1)
        if model.config.model_type == "internvl":
            return _rows(model.get_image_features(pixels, return_dict=True)).flatten(0, 1)
        if is_video:
            return _rows(model.get_video_features(pixels[None], return_dict=True))[0]
        height, width, is_tiled = item.grid
        output = model.get_image_features(
            pixels[None],
            torch.tensor([[height, width]]),
            batch_num_images=torch.tensor([1 if is_tiled else 2]),
            return_dict=True,
        )
        return torch.cat(output.pooler_output)


def _rows(output: Any) -> torch.Tensor:
    rows: torch.Tensor = output.pooler_output
    return rows


def normalised(processor: Any, pixels: torch.Tensor) -> torch.Tensor:
    """A prompt's bytes as the tower takes them, computed in float64."""
    values = pixels.shape[1] // 3
    by_channel = pixels.view(-1, 3, 1, values) if pixels.dim() == 2 else pixels
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (processor.image_mean, processor.image_std)
    )
    scaled = by_channel.double() * processor.rescale_factor
    found: torch.Tensor = ((scaled - mean) / std).float().view(pixels.shape)
    return found


def arranged(turn: Sequence[str | DecodedMedia]) -> tuple[list[ChatMessage], list[DecodedMedia]]:
    """A user turn of texts and media, and its media."""
    media = [part for part in turn if isinstance(part, DecodedMedia)]
    numbers = iter(range(len(media)))
    return user(*(part if isinstance(part, str) else next(numbers) for part in turn)), media


def clip(*, num_frames: int = 6, size: int = 84, fps: float = 2.0, seed: int = 0) -> DecodedMedia:
    """Frames of noise, sampled at ``fps``."""
    seconds = tuple(index / fps for index in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, noise(num_frames, size, size, seed), seconds, fps)


def image(*, height: int = 56, width: int = 84, seed: int = 0) -> DecodedMedia:
    return DecodedMedia(MediaKind.IMAGE, noise(1, height, width, seed), (0.0,), 1.0)


def noise(num_frames: int, height: int, width: int, seed: int) -> torch.Tensor:
    """Frames, uint8 ``[num_frames, height, width, 3]``."""
    size, generator = (num_frames, height, width, 3), torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def answer(model: VideoLanguageModel) -> torch.Tensor:
    """Logits after a prompt with a clip, and of three more tokens: ``[4, vocab_size]``."""
    logits = prefill(model, 0, prepare(model, user(0, "what is it?"), clip(num_frames=2)))
    return torch.cat((logits[None], model.forward(step(0, 0, 5, 6, 7))))


def user(*parts: str | int) -> list[ChatMessage]:
    """One user turn: strings are text, numbers are indices of media."""
    content = tuple(TextPart(p) if isinstance(p, str) else MediaPart(p) for p in parts)
    return [ChatMessage("user", content)]


def prepare(
    model: VideoLanguageModel,
    messages: Sequence[ChatMessage],
    *media: DecodedMedia,
    allow_special_tokens: bool = False,
) -> Prompt:
    """The prompt under the model's own frame limits."""
    return model.prepare_prompt(
        messages, media, FramePlan(), allow_special_tokens=allow_special_tokens
    )


def prefill(
    model: VideoLanguageModel,
    slot: int,
    prompt: Prompt,
    kept: torch.Tensor | None = None,
    *,
    tap: AttentionTap | None = None,
    num_reused: int = 0,
    is_blind: bool = False,
) -> torch.Tensor:
    """Runs a whole prefill, without visual features if ``is_blind``, and gives its logits."""
    visual = None if is_blind else model.embed_visual(prompt)
    *groups, logits = model.prefill(slot, prompt, visual, kept, tap, num_reused)
    assert all(group is None for group in groups)
    assert logits is not None
    return logits


def step(slot: int, start: int, *ids: int) -> StepPlan:
    return StepPlan((SequenceRows(slot, start, ids),))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits in float32 agree up to rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)
