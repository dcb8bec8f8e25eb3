"""Prompts of the Qwen2.5-VL family: chat template, processor and three-axis positions."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
from hippo.models.base import DecodedMedia, Prompt
from hippo.types import ChatMessage, FramePlan, MediaKind, TextPart

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]

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
        ordered = _media_in_order(messages, media)
        videos = [item for item in ordered if item.kind is MediaKind.VIDEO]
        images = [item for item in ordered if item.kind is MediaKind.IMAGE]
        self._refuse_placeholders(messages)
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
            try:
                text = self._processor.apply_chat_template(
                    _conversation(messages, media), tokenize=False, add_generation_prompt=True
                )
            except TemplateError as error:
                raise InvalidRequestError(
                    f"the model's chat template refuses these messages: {error}", param="messages"
                ) from error
            try:
                inputs = self._processor(text=[text], **arguments)
            except ValueError as error:
                raise MediaError(f"the model's processor refuses the media: {error}") from error
        return self._prompt(inputs)

    def _prompt(self, inputs: Any) -> Prompt:
        input_ids = inputs["input_ids"]  # [1, length]
        length = input_ids.shape[1]
        if length >= self._max_context_length:
            raise ContextLengthError(
                f"the prompt is {length} tokens long; this model is served with a context of "
                f"{self._max_context_length}, the completion included: shorten the text or "
                "lower the number or size of the frames",
                param="messages",
            )
        extras = {
            name: inputs[name]
            for name in ("pixel_values_videos", "video_grid_thw", "pixel_values", "image_grid_thw")
            if name in inputs
        }
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
            positions = torch.arange(length).expand(3, length)
        if "image_grid_thw" in extras:
            extras["image_indices"] = (types == _IMAGE_TYPE).nonzero()[:, 0]
        return Prompt(
            input_ids=input_ids[0],
            positions=positions,
            next_position=int(positions.max()) + 1,
            visual_indices=(types == _VIDEO_TYPE).nonzero()[:, 0],
            visual_grids=tuple(
                (frames, rows // self._merge_size, columns // self._merge_size)
                for frames, rows, columns in inputs.get(
                    "video_grid_thw", torch.empty(0, 3, dtype=torch.int64)
                ).tolist()
            ),
            prompt_hash=hashlib.sha256(input_ids[0].numpy().astype("<u4").tobytes()).digest(),
            extras=extras,
        )

    def _refuse_placeholders(self, messages: Sequence[ChatMessage]) -> None:
        placeholders = (self._processor.image_token, self._processor.video_token)
        for message in messages:
            for part in message.content:
                if isinstance(part, TextPart) and any(token in part.text for token in placeholders):
                    raise InvalidRequestError(
                        f"text may not contain {' or '.join(placeholders)}; pass media as parts",
                        param="messages",
                    )


def _media_in_order(
    messages: Sequence[ChatMessage], media: Sequence[DecodedMedia]
) -> list[DecodedMedia]:
    if not messages:
        raise InvalidRequestError("there must be at least one message", param="messages")
    indices = [
        part.media_index
        for message in messages
        for part in message.content
        if not isinstance(part, TextPart)
    ]
    for index in indices:
        if not 0 <= index < len(media):
            raise InvalidRequestError(
                f"a message refers to media item {index}, but there are {len(media)}",
                param="messages",
            )
    if unused := sorted(set(range(len(media))) - set(indices)):
        raise InvalidRequestError(f"no message refers to media item {unused[0]}", param="messages")
    return [media[index] for index in indices]


def _conversation(
    messages: Sequence[ChatMessage], media: Sequence[DecodedMedia]
) -> list[dict[str, Any]]:
    return [
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
