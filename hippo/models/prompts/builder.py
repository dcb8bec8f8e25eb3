"""Makes a Prompt from chat messages and decoded frames; the base class of all families."""

import dataclasses
import hashlib
import importlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hippo.base import thoughts
from hippo.errors import InvalidRequestError, MediaError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits, fit_image, fit_size
from hippo.media.sampling import resolve_plan
from hippo.models.interface.base import NO_INDICES, DecodedMedia, Prompt, VisualItem
from hippo.models.interface.content import visual_digest
from hippo.models.prompts.control_tokens import ControlTokens
from hippo.models.prompts.layout import (
    Layout,
    MediaMark,
    VisualGrid,
    in_written_order,
    lay_out_text,
)
from hippo.models.prompts.messages import (
    check_length,
    media_in_order,
    prompt_hash,
    refuse_placeholders,
    render,
    template_names,
)
from hippo.models.prompts.question import question_indices
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaUse


class PromptBuilder(ABC):
    """Turns chat messages and decoded frames into a Prompt; usable from any thread.

    ``marks`` says how the checkpoint's template and tokenizer write media.
    """

    def __init__(
        self,
        processor: Any,
        frame_limits: FrameLimits,
        marks: Mapping[MediaKind, MediaMark],
        *,
        max_context_length: int,
    ) -> None:
        self.frame_limits = frame_limits
        self.template_names = template_names(processor)
        self._processor = processor
        self._thought_ids = thoughts.thought_ids(processor.tokenizer.added_tokens_decoder)
        self._marks = marks
        self._control_tokens = ControlTokens(processor.tokenizer, marks.values())
        self._max_context_length = max_context_length
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    def build_prompt(
        self,
        messages: Sequence[ChatMessage],
        media: Sequence[DecodedMedia],
        frame_plan: FramePlan,
        *,
        allow_special_tokens: bool = False,
        template_values: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Makes a request's prompt; raises as VideoLanguageModel.prepare_prompt does."""
        given = template_values or {}
        values = {name: given[name] for name in self.template_names if name in given}
        media = [resized(item, frame_plan, self.frame_limits) for item in media]
        ordered = media_in_order(messages, media)
        if allow_special_tokens:
            refuse_placeholders(messages, self._marks.values())
        else:
            messages = self._control_tokens.mask(messages)
        try:
            layouts = self.lay_out(ordered)
        except ValueError as error:
            raise MediaError(f"the model's processor refuses the media: {error}") from error
        with self._lock:
            rendered = render(self._processor, messages, media, values)
            layouts = in_written_order(rendered, layouts, self._marks)
            text = lay_out_text(self._control_tokens.encode, rendered, layouts, self._marks)
            check_length(text.input_ids.shape[0], self._max_context_length)
            items, visual, others = _place_items(layouts, text.places)
            question = question_indices(
                self._processor,
                messages,
                media,
                values,
                rendered=rendered,
                text=text,
                visual_indices=visual,
            )
        _, thought_end_id = self._thought_ids or (None, None)
        if not rendered.rstrip().endswith(thoughts.BEGIN):
            thought_end_id = None
        wanted = given.get("enable_thinking")
        if "enable_thinking" not in values and wanted in (True, False):
            if wanted != (thought_end_id is not None):
                does = "begins no" if wanted else "begins every"
                raise InvalidRequestError(
                    f"enable_thinking is {str(wanted).lower()}, but this model's chat template has "
                    f"no such switch and {does} answer with a thought; leave it out",
                    param="chat_template_kwargs.enable_thinking",
                )
        positions = self.positions(text.input_ids, layouts, text.places, ordered)
        videos = [each.visual_grid for each in layouts if each.visual_grid is not None]
        return Prompt(
            input_ids=text.input_ids,
            positions=positions,
            next_position=int(positions[:, -1].max()) + 1,
            visual_indices=visual,
            visual_grids=tuple(videos),
            question_indices=question,
            prompt_hash=prompt_hash(text.input_ids),
            other_indices=others,
            items=items,
            media=_media_use(media, ordered, items, videos),
            thought_end_id=thought_end_id,
        )

    def video_hash(self) -> bytes:
        """Returns ModelInfo.video_hash, of the limits of a video and of an example's layout."""
        frames = torch.zeros(5, 240, 320, 3, dtype=torch.uint8)
        clip = DecodedMedia(MediaKind.VIDEO, frames, (0.0, 0.5, 1.0, 1.5, 2.0), 2.0)
        (layout,) = self.lay_out([resized(clip, FramePlan(), self.frame_limits)])
        limits = {
            field.name: getattr(self.frame_limits, field.name)
            for field in dataclasses.fields(self.frame_limits)
            # The first two decide no ids of a video, the last only ids of anamorphic videos.
            if field.name not in ("image_pixels", "resample", "as_shown")
        }
        described = json.dumps([limits, layout.pieces, layout.visual_grid])
        return hashlib.sha256(described.encode()).digest()

    @abstractmethod
    def lay_out(self, media: Sequence[DecodedMedia]) -> Sequence[Layout]:
        """Returns a layout for each resized item of a prompt, in the given order; raises ValueError
        for media that the processor refuses."""

    def positions(
        self,
        input_ids: torch.Tensor,
        layouts: Sequence[Layout],
        places: Sequence[torch.Tensor],
        media: Sequence[DecodedMedia],
    ) -> torch.Tensor:
        """Returns Prompt.positions; ``places`` are the places of each layout's visual tokens, and
        the items of a kind have the same order in ``layouts`` and ``media``. By default a token's
        only position is its index."""
        return torch.arange(input_ids.shape[0])[None]


def _place_items(
    layouts: Sequence[Layout], places: Sequence[torch.Tensor]
) -> tuple[tuple[VisualItem, ...], torch.Tensor, torch.Tensor]:
    """Returns Prompt.items, visual_indices and other_indices."""
    items: dict[MediaKind, list[VisualItem]] = {MediaKind.VIDEO: [], MediaKind.IMAGE: []}
    separators = []
    for layout, there in zip(layouts, places, strict=True):
        end = there.shape[0] - layout.num_separators
        digest = visual_digest(layout.kind, layout.pixels, layout.grid)
        item = VisualItem(layout.kind, digest, there[:end], layout.grid, layout.pixels)
        items[layout.kind].append(item)
        separators.append(there[end:])
    videos, images = items[MediaKind.VIDEO], items[MediaKind.IMAGE]
    visual = torch.cat([NO_INDICES, *[item.places for item in videos]])
    others = torch.cat([NO_INDICES, *[item.places for item in images], *separators])
    return (*videos, *images), visual, others


def _media_use(
    media: Sequence[DecodedMedia],
    ordered: Sequence[DecodedMedia],
    items: Sequence[VisualItem],
    grids: Sequence[VisualGrid],
) -> tuple[MediaUse, ...]:
    """Describes the items of a request; ``ordered`` are the prompt's items, in its order."""
    shown = sorted(ordered, key=lambda item: item.kind is MediaKind.IMAGE)  # as Prompt.items
    num_tokens = {
        id(item): int(visual.places.shape[0]) for item, visual in zip(shown, items, strict=True)
    }
    grid_of = {
        id(item): grid for item, grid in zip(shown, grids, strict=False)
    }  # videos come first
    return tuple(
        MediaUse(
            item.kind,
            num_frames,
            width,
            height,
            num_tokens[id(item)],
            visual_grid=grid_of.get(id(item), ()),
            frame_seconds=tuple(item.frame_seconds) if item.kind is MediaKind.VIDEO else (),
            notes=item.notes,
        )
        for item in media
        for num_frames, height, width, _ in (item.frames.shape,)
    )


def resized(item: DecodedMedia, plan: FramePlan, limits: FrameLimits) -> DecodedMedia:
    """Returns the item with its frames in the size that the model takes, to the last bit as
    transformers' processors resize them. The media decoder has resized most frames already, but
    not a warm-up's or a test's.

    Raises InvalidRequestError for a plan out of range, and MediaError for too narrow a frame.
    """
    if item.is_resized:
        return item
    resolved = resolve_plan(plan, DecodeLimits(), limits, item.kind)
    num_frames, height, width, _ = item.frames.shape
    if item.kind is MediaKind.IMAGE:
        size = fit_image(height, width, resolved, limits)
    else:
        size = fit_size(num_frames, height, width, resolved, limits)
    frames = item.frames
    if size != (height, width):
        functional: Any = importlib.import_module("torchvision.transforms.v2.functional")
        utils: Any = importlib.import_module("transformers.image_utils")
        interpolation = utils.pil_torch_interpolation_mapping[limits.resample]
        channels_first = functional.resize(
            frames.permute(0, 3, 1, 2), list(size), interpolation=interpolation, antialias=True
        )
        frames = channels_first.permute(0, 2, 3, 1)
    return dataclasses.replace(item, frames=frames, is_resized=True)
