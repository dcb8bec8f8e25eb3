"""The events of a stream with ``return_events``; ``gateway.answer.events`` makes them.

Times are in milliseconds. ``at`` is the time of arrival at the gateway, counted from the arrival of
the request.
"""

from typing import Annotated, Literal

from pydantic import Field

from gateway.answer.figures import Described, ShownMedia

Service = Literal["target", "draft"]


class SeenMedia(ShownMedia):
    """What a service sees of one video or image of the request."""

    grid: list[int]
    """Frames, rows and columns of the visual tokens that can be pruned; empty for an image, and
    from a service of an older release."""
    frame_seconds: list[float]
    """Time of each sampled frame, in seconds; a frame of the grid may be several sampled ones."""


class PromptEvent(Described):
    """A service has read the media and made the prompt."""

    type: Literal["prompt"]
    at: float
    service: Service
    queue: float
    """Waiting for a slot."""
    preprocess: float
    """Decoding and resizing."""
    num_prompt_tokens: int
    num_visual_tokens: int
    """The visual tokens that can be pruned."""
    media: list[SeenMedia]
    """In the order of the request."""


class SelectionEvent(Described):
    """The target has chosen the visual tokens that the draft sees."""

    type: Literal["selection"]
    at: float
    strategy: str
    ratio: float
    score: float
    """The time that scoring and choosing took."""
    num_visual_tokens: int
    kept: list[int]
    """Ascending indices into the grids of all videos, one grid after the other; in a grid frame by
    frame, then row by row."""


class PrefillEvent(Described):
    """The draft's prefill is over."""

    type: Literal["draft_prefill"]
    at: float
    forward: float
    """Device time, the vision tower's included."""
    vision: float
    """The vision tower's part of it."""
    wait: float
    """How long the device waited, mostly for the selection."""
    context: int
    """Prompt tokens that were cached."""


class BlockEvent(Described):
    """The draft has sent a block of draft tokens."""

    type: Literal["block"]
    at: float
    block: int
    """Number of the block, from 0."""
    index: int
    """Completion index of its first token."""
    token_ids: list[int]
    guessed_places: list[int]
    """Places in `token_ids` of the tokens that stood in an n-gram guess, which the draft then
    confirmed."""
    branches: list[list[int]]
    """Ids of branches: the draft's second choice of a token, and what follows it."""
    is_stale: bool
    """Whether it came after the rejection of its run."""
    step: float
    """Device time per draft token, a running mean."""
    wait: float
    """Idle time of the draft's device before the block."""


class EventToken(Described):
    """A token of the answer."""

    id: int
    text: str
    """Empty while a character is incomplete, and of an end token."""
    index: int
    """Completion index, from 0."""
    source: Literal["draft", "guess", "target"]
    """Who wrote it: an accepted draft token, an accepted draft token that stood in an n-gram guess,
    or the target itself."""
    block: int = 0
    """Of a draft token: the number of its block."""
    place: int = 0
    """Of a draft token: its place in the block, from 0; tokens of branches follow."""
    is_thought: bool = False
    """Only of a token of the thought."""


class VerdictEvent(Described):
    """The target has settled tokens, by its prefill or by a forward."""

    type: Literal["verdict"]
    at: float
    forward_number: int
    """0 is the prefill."""
    mode: Literal["prefill", "optimistic", "conservative", "target_only"]
    """The mode of the forward; target_only if it verified no draft token."""
    forward: float
    """Device time; of a prefill the vision tower's included."""
    vision: float = 0.0
    """Of a prefill: the vision tower's part."""
    helper: float = 0.0
    """Of a prefill: how long the prefill helper, on the draft's device, ran layers of it."""
    helper_wait: float = 0.0
    """Of a prefill: from the start of its device work to the helper's."""
    wait: float
    """How long the device waited for draft tokens before."""
    between: float
    """Other time since the forward before."""
    context: int
    """Cached tokens before the rows."""
    rows: int
    num_sequences: int
    """In the forward, of all requests; 0: not told."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_reused_tokens: int = 0
    """Verified tokens of a broken run; num_draft_tokens is then 0."""
    num_accepted_reused: int = 0
    is_rejection: bool
    num_dropped_tokens: int
    tokens: list[EventToken]


class DraftLossEvent(Described):
    """The answer goes on without the draft, at least for a while."""

    type: Literal["draft_loss"]
    at: float
    problem: str


StreamEvent = Annotated[
    PromptEvent | SelectionEvent | PrefillEvent | BlockEvent | VerdictEvent | DraftLossEvent,
    Field(discriminator="type"),
]
