"""Plain values that the library, the services and the gateway share; standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

PROTOCOL_VERSION = 1


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class MediaKind(enum.Enum):
    """What a media item holds."""

    VIDEO = "video"
    IMAGE = "image"


class PruningStrategy(enum.Enum):
    """How the visual tokens that the draft sees are chosen."""

    NONE = "none"
    UNIFORM = "uniform"
    RANDOM = "random"
    BLIND = "blind"
    ATTENTION = "attention"
    HOLISTIC = "holistic"
    SPECVLM = "specvlm"
    HYBRID = "hybrid"


SpatialScore = Literal["contrast", "variance"]
"""How a visual token is compared with its surroundings; see hippo.pruning.scores."""


@dataclass(frozen=True, slots=True)
class Media:
    """One compressed video or image file; a video may be a list of frames (video/frame_list)."""

    kind: MediaKind
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A reference to an item of the request's media."""

    media_index: int


ContentPart = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One chat turn; role is "system", "user" or "assistant"."""

    role: str
    content: tuple[ContentPart, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the token rule; the defaults are greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to the logit)
    seed: int = 0  # uint64
    choice_index: int = 0
    min_tokens: int = 0  # end tokens cannot be chosen at completion indices below it


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Which frames of a video are looked at; 0: the model's default or the operator's limit."""

    fps: float = 0.0
    min_frames: int = 0
    max_frames: int = 0
    max_pixels: int = 0  # of one frame after resizing


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which visual tokens the draft sees.

    ``ratio`` is the share dropped, 0 to 0.99; of fewer than ``min_visual_tokens`` none is dropped.
    """

    strategy: PruningStrategy = PruningStrategy.UNIFORM
    ratio: float = 0.9
    seed: int = 0
    min_visual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the verifier does when its device is free.

    It waits at most ``wait_ns`` for ``min_draft_tokens`` and verifies at most
    ``max_draft_tokens`` in one forward (0: target-only).
    """

    min_draft_tokens: int = 0
    max_draft_tokens: int = 0
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast each side goes.

    The verifier steps under ``optimistic`` after a block was accepted whole and under
    ``conservative`` after a rejection. The drafter goes at most ``max_ahead`` tokens beyond the
    last commit it knows and sends blocks of ``block_size``.
    """

    optimistic: StepLimits = StepLimits()
    conservative: StepLimits = StepLimits()
    max_ahead: int = 0
    block_size: int = 1

    @property
    def for_target(self) -> tuple[StepLimits, StepLimits]:
        """All that a verifier goes by."""
        return self.optimistic, self.conservative

    @property
    def for_draft(self) -> tuple[int, int, int]:
        """All that a drafter goes by; a run's first block has as many tokens as are waited for."""
        return self.max_ahead, self.block_size, self.conservative.min_draft_tokens


TARGET_ONLY = Pace()


@dataclass(frozen=True, slots=True)
class Block:
    """A run of draft tokens; ``start_index`` is the completion index of the first."""

    epoch: int
    start_index: int
    token_ids: tuple[int, ...]
    is_exhausted: bool = False  # nothing further comes until the next commit
    step_ns: int = 0  # device time of a drafted token, running mean
    wait_ns: int = 0  # how long the draft's device idled before this block


@dataclass(frozen=True, slots=True)
class Timing:
    """Device times of one step or prefill, in nanoseconds."""

    queue_ns: int = 0
    forward_ns: int = 0
    wait_ns: int = 0  # the device waited for the other side
    num_rows: int = 0
    context_length: int = 0  # cached tokens before them; a prefill's: reused ones
    num_sequences: int = 0  # that shared the forward, this one included; 0: not said
    num_batch_rows: int = 0  # of all of them


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by log-softmax of the target's logits as the model gave them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens the target has settled: accepted draft tokens, then its own."""

    epoch: int  # after this verdict
    start_index: int  # completion index of the first id
    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0  # in the forward
    num_accepted_tokens: int = 0
    is_rejection: bool = False  # the run broke here: what was queued is dropped
    num_dropped_tokens: int = 0  # the rejected draft token and all queued after it
    finish_reason: FinishReason | None = None
    timing: Timing = Timing()
    is_conservative: bool = False  # the forward ran under the conservative limits
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if they were asked for


@dataclass(frozen=True, slots=True)
class Commit:
    """Settled tokens, told to the draft."""

    epoch: int
    start_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What a service found in a prompt."""

    prompt_hash: bytes
    num_prompt_tokens: int
    num_visual_tokens: int  # prunable ones
    queue_ns: int = 0
    preprocess_ns: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The visual tokens the draft is to look at, as ascending indices into the prunable ones."""

    kept_indices: tuple[int, ...]
    num_visual_tokens: int
    score_ns: int = 0


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The beginning of one sequence, the same for the draft and the target."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    media: tuple[Media, ...]
    sampling: SamplingParams
    frame_plan: FramePlan
    pruning: Pruning
    max_tokens: int
    end_token_ids: tuple[int, ...]  # empty: no token ends the completion
    pace: Pace = TARGET_ONLY
    committed_ids: tuple[int, ...] = ()  # a draft that joins in mid-answer
    epoch: int = 0
    cache_salt: str = ""  # what is cached is shared only among requests with the same one
    num_top_logprobs: int | None = None  # of each token; None: no log-probabilities at all
    is_max_tokens_default: bool = False  # it becomes what is left of the context if that is less


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a service serves."""

    name: str
    family: str
    device: str
    dtype: str
    tokenizer_hash: bytes
    tokenizer_json: bytes = field(repr=False)
    num_token_ids: int  # logits are cut to them
    end_token_ids: tuple[int, ...]
    max_context_length: int
    num_slots: int
    num_parameters: int
    protocol_version: int = PROTOCOL_VERSION
    device_uuids: tuple[str, ...] = ()  # of its GPUs, the same in every process and container
