"""A video language model without weights: logits are a seeded function of the ids before them.

It keeps a cache of ids the way a real one keeps keys and values, so a wrong rollback, row order or
slot shows in its output.
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hippo.errors import InvalidRequestError, MediaError
from hippo.media.resizing import FrameLimits
from hippo.models.interface.base import (
    NO_INDICES,
    AttentionTap,
    DecodedMedia,
    FeatureCache,
    Prompt,
    StepPlan,
    VisualItem,
)
from hippo.models.interface.content import cached_places, visual_digest
from hippo.models.prompts.messages import media_in_order
from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, ModelInfo, TextPart

NUM_TOKEN_IDS = 64
END_TOKEN_ID = 1
VISUAL_TOKEN_ID = 2
_FIRST_TEXT_ID = 3
_NUM_CONTEXTS = 509
_TOKENS_PER_FRAME = 4


class ToyModel:
    """Deterministic; ``noise`` makes a draft that agrees with the noiseless target at times.

    ``on_embed`` is called before each item of the vision tower, ``on_piece`` before each layer
    group and ``on_forward`` before each forward, on the device thread: tests hold or break the
    device there.
    """

    num_layers = 3  # each is a group
    hidden_size = 1
    frame_limits = FrameLimits()
    feature_bytes = frame_bytes = 0

    def __init__(
        self, *, num_slots: int = 2, max_context_length: int = 512, noise: float = 0.0
    ) -> None:
        self.info = ModelInfo(
            name="toy",
            family="toy",
            device="cpu",
            dtype="float32",
            tokenizer_hash=b"toy",
            tokenizer_json=b"{}",
            num_token_ids=NUM_TOKEN_IDS,
            end_token_ids=(END_TOKEN_ID,),
            max_context_length=max_context_length,
            num_slots=num_slots,
            num_parameters=0,
        )
        own, other = (
            torch.randn(_NUM_CONTEXTS, NUM_TOKEN_IDS, generator=torch.Generator().manual_seed(seed))
            for seed in (0, 1)
        )
        self._table = own * 2 + other * noise
        self._prompts: dict[int, int] = {}  # slot to the prompt's key
        self._ids: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
        # What each slot's rows are of: token id, and the digest of the item that it belongs to.
        self._rows: dict[int, list[tuple[int, bytes | None]]] = {s: [] for s in range(num_slots)}
        self._num_prompt_rows: dict[int, int] = {}
        self.on_piece: Callable[[int], None] = lambda slot: None
        self.on_embed: Callable[[int], None] = lambda index: None
        self.on_forward: Callable[[StepPlan], None] = lambda plan: None
        self.plans: list[StepPlan] = []
        self.kept: list[int | None] = []  # visual tokens of each prefill
        self.tapped: list[int | None] = []  # layers tapped in each prefill
        self.taps: list[tuple[str, bool]] = []  # scope of each tap, and whether of alignment
        self.reused: list[int] = []  # rows taken over by each prefill
        self.num_copied = 0  # prefills whose rows began with another slot's
        self.num_embedded = 0  # items that passed the vision tower
        self.threads: set[str] = set()  # that ran device work

    def held_ids(self, slot: int) -> list[int]:
        """Token ids of all rows that were last written to the slot, those rolled back included."""
        return [token_id for token_id, _ in self._rows[slot]]

    def prepare_prompt(
        self,
        messages: Sequence[ChatMessage],
        media: Sequence[DecodedMedia],
        frame_plan: FramePlan,
        *,
        allow_special_tokens: bool = False,
        template_values: Mapping[str, Any] | None = None,
    ) -> Prompt:
        ids: list[int] = []
        items: dict[MediaKind, list[VisualItem]] = {kind: [] for kind in MediaKind}
        media_in_order(messages, media)  # refuses what does not fit
        for part in (part for message in messages for part in message.content):
            if isinstance(part, TextPart):
                num_text_ids = NUM_TOKEN_IDS - _FIRST_TEXT_ID
                ids += [_FIRST_TEXT_ID + byte % num_text_ids for byte in part.text.encode()]
            else:
                assert isinstance(part, MediaPart)
                one = media[part.media_index]
                num_tokens = one.frames.shape[0] * _TOKENS_PER_FRAME
                places = torch.arange(len(ids), len(ids) + num_tokens)
                digest = visual_digest(one.kind, one.frames, ())
                items[one.kind].append(
                    VisualItem(one.kind, digest, places, (), one.frames.flatten())
                )
                ids += [VISUAL_TOKEN_ID] * num_tokens
        if not ids:
            raise InvalidRequestError("the messages are empty", param="messages")
        input_ids = torch.tensor(ids, dtype=torch.int64)
        digest = hashlib.sha256(input_ids.to(torch.int32).numpy().tobytes()).digest()
        visual, other = (
            torch.cat([NO_INDICES, *(item.places for item in items[kind])])
            for kind in (MediaKind.VIDEO, MediaKind.IMAGE)
        )
        return Prompt(
            input_ids=input_ids,
            positions=torch.arange(len(ids))[None],
            next_position=len(ids),
            visual_indices=visual,
            visual_grids=tuple(
                (len(item.places) // _TOKENS_PER_FRAME, 2, 2) for item in items[MediaKind.VIDEO]
            ),
            question_indices=(input_ids != VISUAL_TOKEN_ID).nonzero()[:, 0],
            prompt_hash=digest,
            other_indices=other,
            items=(*items[MediaKind.VIDEO], *items[MediaKind.IMAGE]),
        )

    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        rows = []
        for item in prompt.items:
            features = None if cache is None else cache.get(item.digest)
            if features is None:
                self.num_embedded += 1
                generator = torch.Generator().manual_seed(int.from_bytes(item.digest[:4], "little"))
                features = torch.randn(item.places.shape[0], 4, generator=generator)
                if cache is not None:
                    cache.put(item.digest, features)
            rows.append(features)
        return torch.cat(rows) if rows else None

    def embed_pieces(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> Generator[torch.Tensor, None, torch.Tensor | None]:
        """A piece an item, whose rows nothing reads; ``on_embed`` is called before each."""
        for index, _ in enumerate(prompt.items):
            self.on_embed(index)
            yield torch.empty(0, 4)
        return self.embed_visual(prompt, cache)

    def begin_help(self, *_: object) -> None:
        """See VideoLanguageModel.begin_help; there is no helper."""

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """A layer is a group. Later visual tokens score higher, whatever the layers tapped.

        The first group overwrites what is not reused; it is whole again after the last one.
        """
        self.threads.add(threading.current_thread().name)
        self.kept.append(None if kept is None else int(kept.shape[0]))
        self.tapped.append(None if tap is None else tap.num_layers)
        if tap is not None:
            self.taps.append((tap.scope, tap.is_alignment))
        self.reused.append(num_reused)
        rows = _rows_of(prompt, kept)
        cached = self._rows[slot]
        assert num_reused < len(rows), "the last row is never reused"
        assert cached[:num_reused] == rows[:num_reused], "reused rows are of another content"
        if visual is None and num_reused:
            assert all(digest is None for _, digest in rows[num_reused:]), "a row without features"
        for layer in range(self.num_layers):
            self.on_piece(slot)
            del cached[num_reused:]
            if tap is not None and tap.num_layers == layer + 1:
                places = torch.arange(prompt.visual_indices.shape[0], dtype=torch.float32)
                tap.layer_scores = places.expand(tap.num_layers, -1)
            yield None
        self._prompts[slot] = int.from_bytes(prompt.prompt_hash[:4], "little")
        self._ids[slot] = []
        self._num_prompt_rows[slot] = len(rows)
        self._rows[slot][num_reused:] = rows[num_reused:]
        yield self._table[self._context(slot, 0)].clone()

    def reusable_rows(self, slot: int, num_rows: int) -> int:
        return num_rows

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        self.threads.add(threading.current_thread().name)
        assert 0 < num_rows <= len(self._rows[source]) and source != slot
        self.num_copied += 1
        self._rows[slot] = self._rows[source][:num_rows]

    def forward(self, plan: StepPlan) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        self.on_forward(plan)
        self.plans.append(plan)
        contexts = []
        for rows in plan.sequences:
            ids = self._ids[rows.slot]
            assert rows.start_index <= len(ids), "rows must follow the cache without a gap"
            ids[rows.start_index :] = rows.token_ids
            cached = self._rows[rows.slot]
            cached[self._num_prompt_rows[rows.slot] + rows.start_index :] = [
                (token_id, None) for token_id in rows.token_ids
            ]
            contexts += [
                self._context(rows.slot, rows.start_index + row + 1)
                for row in range(len(rows.token_ids))
            ]
        return self._table[torch.tensor(contexts)]

    def _context(self, slot: int, index: int) -> int:
        """Which row of the table gives the logits of completion token ``index``."""
        key = self._prompts[slot]
        for token_id in self._ids[slot][max(0, index - 3) : index]:
            key = key * 31 + token_id + 7
        return (key + index // 8) % _NUM_CONTEXTS


def _rows_of(prompt: Prompt, kept: torch.Tensor | None) -> list[tuple[int, bytes | None]]:
    """What a prefill caches."""
    digests = {int(place): item.digest for item in prompt.items for place in item.places}
    places = cached_places(prompt, kept)
    ids = prompt.input_ids.tolist()
    return [
        (ids[place], digests.get(place))
        for place in (range(prompt.length) if places is None else places.tolist())
    ]


class ToyDecoder:
    """Reads b"toy:N" as N frames."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        data = Path(media.path).read_bytes() if media.path else media.data
        prefix, _, count = data.partition(b":")
        if prefix != b"toy" or not count.isdigit():
            raise MediaError("not a toy video")
        num_frames = int(count)
        return DecodedMedia(
            kind=media.kind,
            frames=torch.zeros(num_frames, 8, 8, 3, dtype=torch.uint8),
            frame_seconds=tuple(index / 2 for index in range(num_frames)),
            sampled_fps=2.0,
        )
