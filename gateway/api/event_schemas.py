"""Models of the events of a stream with ``return_events``; ``gateway.answer.events`` writes them.

Times are in milliseconds. ``at`` is the time of arrival at the gateway, counted from the arrival of
the request.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gateway.answer.events import Service


class SeenMedia(BaseModel):
    """What a service sees of one video or image of the request."""

    type: Literal["video", "image"]
    num_tokens: int = Field(description="Visual tokens.")
    width: int = Field(description="Of a frame after resizing, in pixels.")
    height: int
    grid: list[int] = Field(
        description="Frames, rows and columns of the visual tokens that can be pruned; empty for "
        "an image, and from a service of an older release."
    )
    frame_seconds: list[float] = Field(
        description="Time of each sampled frame, in seconds; a frame of the grid may be several "
        "sampled ones."
    )
    notes: list[str] = Field(description="What of the file could not be used, a sentence each.")


class PromptEvent(BaseModel):
    """A service has read the media and made the prompt."""

    type: Literal["prompt"]
    at: float
    service: Service
    queue: float = Field(description="Waiting for a slot.")
    preprocess: float = Field(description="Decoding and resizing.")
    num_prompt_tokens: int
    num_visual_tokens: int = Field(description="The visual tokens that can be pruned.")
    media: list[SeenMedia] = Field(description="In the order of the request.")


class SelectionEvent(BaseModel):
    """The target has chosen the visual tokens that the draft sees."""

    type: Literal["selection"]
    at: float
    strategy: str
    ratio: float
    score: float = Field(description="The time that scoring and choosing took.")
    num_visual_tokens: int
    kept: list[int] = Field(
        description="Ascending indices into the grids of all videos, one grid after the other; in "
        "a grid frame by frame, then row by row."
    )


class PrefillEvent(BaseModel):
    """The draft's prefill is over."""

    type: Literal["draft_prefill"]
    at: float
    forward: float = Field(description="Device time, the vision tower's included.")
    vision: float = Field(description="The vision tower's part of it.")
    wait: float = Field(description="How long the device waited, mostly for the selection.")
    context: int = Field(description="Prompt tokens that were cached.")


class BlockEvent(BaseModel):
    """The draft has sent a block of draft tokens."""

    type: Literal["block"]
    at: float
    block: int = Field(description="Number of the block, from 0.")
    index: int = Field(description="Completion index of its first token.")
    token_ids: list[int]
    guessed_places: list[int] = Field(
        description="Places in `token_ids` of the tokens that stood in an n-gram guess, which the "
        "draft then confirmed."
    )
    branches: list[list[int]] = Field(
        description="Ids of branches: the draft's second choice of a token, and what follows it."
    )
    is_stale: bool = Field(description="Whether it came after the rejection of its run.")
    step: float = Field(description="Device time per draft token, a running mean.")
    wait: float = Field(description="Idle time of the draft's device before the block.")


class EventToken(BaseModel):
    """A token of the answer."""

    id: int
    text: str = Field(description="Empty while a character is incomplete, and of an end token.")
    index: int = Field(description="Completion index, from 0.")
    source: Literal["draft", "guess", "target"] = Field(
        description="Who wrote it: an accepted draft token, an accepted draft token that stood in "
        "an n-gram guess, or the target itself."
    )
    block: int = Field(default=0, description="Of a draft token: the number of its block.")
    place: int = Field(
        default=0,
        description="Of a draft token: its place in the block, from 0; those of branches follow.",
    )


class VerdictEvent(BaseModel):
    """The target has settled tokens, by its prefill or by a forward."""

    type: Literal["verdict"]
    at: float
    forward_number: int = Field(description="0 is the prefill.")
    mode: Literal["prefill", "optimistic", "conservative", "target_only"] = Field(
        description="The mode of the forward; target_only if it verified no draft token."
    )
    forward: float = Field(description="Device time; of a prefill the vision tower's included.")
    vision: float = Field(default=0.0, description="Of a prefill: the vision tower's part.")
    wait: float = Field(description="How long the device waited for draft tokens before.")
    between: float = Field(description="Other time since the forward before.")
    context: int = Field(description="Cached tokens before the rows.")
    rows: int
    num_sequences: int = Field(description="In the forward, of all requests; 0: not told.")
    num_draft_tokens: int
    num_accepted_tokens: int
    num_reused_tokens: int = Field(
        default=0, description="Verified tokens of a broken run; num_draft_tokens is then 0."
    )
    num_accepted_reused: int = 0
    is_rejection: bool
    num_dropped_tokens: int
    tokens: list[EventToken]


class DraftLossEvent(BaseModel):
    """The answer goes on without the draft, at least for a while."""

    type: Literal["draft_loss"]
    at: float
    problem: str


StreamEvent = Annotated[
    PromptEvent | SelectionEvent | PrefillEvent | BlockEvent | VerdictEvent | DraftLossEvent,
    Field(discriminator="type"),
]
