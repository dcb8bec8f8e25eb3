"""Qwen2.5-VL: transformers' model and processor behind the project's interface."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from hippo.errors import ContextLengthError, ModelLoadError
from hippo.models._torchvision import ensure_torchvision
from hippo.models.attention import Step, plan_sequence
from hippo.models.base import DecodedMedia, Prompt, StepPlan
from hippo.models.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.decoder import DecoderStack, TransformersStack
from hippo.models.fused import FusedStack
from hippo.models.linear import make_half_linear, make_linear
from hippo.models.memory import check_fits
from hippo.models.qwen_prompt import PromptBuilder
from hippo.models.vision import speed_up_vision
from hippo.models.vocabulary import end_token_ids, num_token_ids, tokenizer_hash
from hippo.types import ChatMessage, FramePlan, ModelInfo

_NUM_LAYER_GROUPS = 8  # a prefill can be left between two groups
_CHUNK_ROWS = 2048  # prompt rows that one group takes at a time


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a filled slot remembers of its prompt."""

    prompt_length: int  # cached tokens, the dropped ones not counted
    next_position: int


class Qwen2_5_VL:
    """A loaded Qwen2.5-VL checkpoint with its key-value cache; see VideoLanguageModel."""

    def __init__(
        self,
        model: Any,
        prompts: PromptBuilder,
        stack: DecoderStack,
        cache: KeyValueCache,
        info: ModelInfo,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._stack = stack
        self._cache = cache
        self._info = info
        self._embedding = model.get_input_embeddings().weight
        text = model.config.text_config
        self._groups = text.num_attention_heads // text.num_key_value_heads
        self._slots: dict[int, _Slot] = {}
        with torch.inference_mode():
            self._rotary_table = self._text_rotary(min(2048, info.max_context_length))

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """See VideoLanguageModel.prepare."""
        return self._prompts.build(messages, media, frame_plan)

    @torch.inference_mode()
    def embed_visual(self, prompt: Prompt) -> torch.Tensor | None:
        """Vision tower: ``[num_visual_tokens, hidden]``, followed by the images' tokens, if any."""
        features = []
        for kind in ("video", "image"):
            pixels = prompt.extras.get("pixel_values_videos" if kind == "video" else "pixel_values")
            if pixels is not None:
                grids = prompt.extras[f"{kind}_grid_thw"]
                embed = getattr(self._model.model, f"get_{kind}_features")
                weight = self._embedding
                pixels = pixels.to(device=weight.device, dtype=weight.dtype)
                features += embed(pixels, grids, return_dict=True).pooler_output
        return torch.cat(features) if features else None

    def prefill(
        self, slot: int, prompt: Prompt, visual: torch.Tensor | None, kept: torch.Tensor | None
    ) -> Iterator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill; long prompts go through each layer group in chunks."""
        self._slots.pop(slot, None)
        with torch.inference_mode():
            hidden, rotary = self._prompt_rows(prompt, visual, kept)
            chunks = self._chunks(slot, hidden.shape[0])
        num_layers = self._stack.num_layers
        bounds = [round(num_layers * i / _NUM_LAYER_GROUPS) for i in range(_NUM_LAYER_GROUPS + 1)]
        for first, last in itertools.pairwise(bounds):
            if first == last:
                continue
            with torch.inference_mode():
                for rows, step in chunks:
                    hidden[rows] = self._stack.run(hidden[rows], rotary[rows], step, first, last)
            yield None
        with torch.inference_mode():
            logits = self._stack.logits(hidden[-1:])[0]
        self._slots[slot] = _Slot(hidden.shape[0], prompt.next_position)
        yield logits

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See VideoLanguageModel.forward; ContextLengthError when a slot is full."""
        token_ids: list[int] = []
        rotary: list[torch.Tensor] = []
        sequences = []
        for sequence in plan.sequences:
            slot = self._slots[sequence.slot]
            num_rows = len(sequence.token_ids)
            start = slot.prompt_length + sequence.start_index
            if start + num_rows > self._cache.shape.capacity:
                raise ContextLengthError(
                    f"{start + num_rows} tokens do not fit in a context of "
                    f"{self._cache.shape.capacity}"
                )
            position = slot.next_position + sequence.start_index
            rotary.append(self._completion_rotary(position, num_rows))
            sequences.append(
                plan_sequence(
                    self._cache,
                    sequence.slot,
                    first_row=len(token_ids),
                    start=start,
                    num_rows=num_rows,
                    groups=self._groups,
                )
            )
            token_ids += sequence.token_ids
        ids = torch.tensor(token_ids, device=self._embedding.device)
        hidden = torch.embedding(self._embedding, ids)
        hidden = self._stack.run(
            hidden,
            rotary[0] if len(rotary) == 1 else torch.cat(rotary),
            Step(tuple(sequences), self._cache.dtype),
            0,
            self._stack.num_layers,
        )
        return self._stack.logits(hidden)

    def _prompt_rows(
        self, prompt: Prompt, visual: torch.Tensor | None, kept: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings ``[rows, hidden]`` and rotary factors of the prompt tokens that are cached."""
        device = self._embedding.device
        hidden = torch.embedding(self._embedding, prompt.input_ids.to(device))
        visual_indices = prompt.visual_indices
        if visual is not None:
            places = visual_indices
            if (image_indices := prompt.extras.get("image_indices")) is not None:
                places = torch.cat((places, image_indices))
            hidden.index_copy_(0, places.to(device), visual.to(hidden.dtype))
        positions = prompt.positions.to(device)
        if kept is not None:
            is_cached = torch.ones(prompt.length, dtype=torch.bool)
            is_cached[visual_indices] = False
            is_cached[visual_indices[kept.cpu()]] = True
            cached = is_cached.nonzero()[:, 0].to(device)
            hidden, positions = hidden[cached], positions[:, cached]
        return hidden, self._stack.rotary(positions)

    def _chunks(self, slot: int, num_rows: int) -> list[tuple[slice, Step]]:
        if num_rows >= self._cache.shape.capacity:
            raise ContextLengthError(
                f"a prompt of {num_rows} cached tokens leaves no room in a context of "
                f"{self._cache.shape.capacity}"
            )
        chunks = []
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows = slice(start, min(start + _CHUNK_ROWS, num_rows))
            sequence = plan_sequence(
                self._cache,
                slot,
                first_row=0,
                start=start,
                num_rows=rows.stop - start,
                groups=self._groups,
            )
            chunks.append((rows, Step((sequence,), self._cache.dtype)))
        return chunks

    def _completion_rotary(self, position: int, num_rows: int) -> torch.Tensor:
        end = position + num_rows
        if end > self._rotary_table.shape[0]:
            self._rotary_table = self._text_rotary(2 * end)
        return self._rotary_table[position:end]

    def _text_rotary(self, length: int) -> torch.Tensor:
        """Rotary factors of text positions ``0:length``, which are the same on every axis."""
        positions = torch.arange(length, device=self._embedding.device)
        return self._stack.rotary(positions.expand(3, length))


def load(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    max_context_length: int,
    served_name: str,
    progress: Progress,
    is_fused: bool = True,
) -> Qwen2_5_VL:
    """Loads a Qwen2.5-VL checkpoint; hippo.models.loading.load_model is the way in.

    ``is_fused`` False runs transformers' modules as they are: slower, and the reference that the
    fused ones are tested against.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")  # its own hints are partial
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        processor = transformers.AutoProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its configuration, tokenizer or processor cannot be read: {error}"
        ) from error
    text = config.text_config
    # On a CPU float16 is how weights are kept; activations, cache and arithmetic are float32.
    is_half = is_fused and dtype == torch.float16 and device.type == "cpu"
    working_dtype = torch.float32 if is_half else dtype
    shape = CacheShape(
        num_layers=text.num_hidden_layers,
        num_slots=num_slots,
        num_kv_heads=text.num_key_value_heads,
        capacity=max_context_length,
        head_dim=text.hidden_size // text.num_attention_heads,
    )
    check_fits(
        checkpoint.name,
        weight_bytes=checkpoint.num_parameters * working_dtype.itemsize,
        cache_bytes=shape.num_bytes(cache_dtype(working_dtype, device)),
        device=device,
        dtype=dtype,
        num_slots=num_slots,
        max_context_length=max_context_length,
    )
    progress("loading", 0.1)
    try:
        architecture = transformers.Qwen2_5_VLForConditionalGeneration
        with _quiet(transformers):
            model, problems = architecture.from_pretrained(
                checkpoint.folder,
                dtype=working_dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{checkpoint.name}: its weights cannot be read: {error}") from error
    lacking = sorted(problems["missing_keys"]) + sorted(map(str, problems["mismatched_keys"]))
    if lacking:
        raise ModelLoadError(
            f"{checkpoint.name}: its weights do not fit its configuration; missing or of another "
            f"shape: {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}"
        )
    model.eval().requires_grad_(False).to(device)
    progress("loading", 0.7)
    tokenizer = processor.tokenizer
    num_ids = num_token_ids(tokenizer, text.vocab_size)
    text_model = model.model.language_model
    stack: DecoderStack
    if is_fused:
        make = make_half_linear if is_half else make_linear
        speed_up_vision(model.model.visual, make)
        stack = FusedStack(text_model, model.lm_head, num_ids, make)
    else:
        stack = TransformersStack(text_model, model.lm_head, num_ids)
    info = ModelInfo(
        name=served_name,
        family=checkpoint.model_type,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(tokenizer),
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        num_token_ids=num_ids,
        end_token_ids=end_token_ids(model.generation_config, tokenizer),
        max_context_length=max_context_length,
        num_slots=num_slots,
        num_parameters=checkpoint.num_parameters,
    )
    return Qwen2_5_VL(
        model,
        PromptBuilder(processor, model.model.get_rope_index, max_context_length=max_context_length),
        stack,
        KeyValueCache(shape, dtype=cache_dtype(working_dtype, device), device=device),
        info,
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers' progress bars off the terminal: progress has its own way out."""
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
