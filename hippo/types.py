"""Plain values that the library, the services and the gateway share; standard library only."""

import enum
from dataclasses import dataclass, field

PROTOCOL_VERSION = 1
PRUNING_RATIO = 0.9  # default share of a video's visual tokens that the draft does not see
MIN_VISUAL_TOKENS = 512  # by default a prompt with fewer visual tokens is not pruned


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
    UV = "uv"


class SpatialScore(enum.StrEnum):
    """How a visual token is compared with its surroundings: by the mean of its distances to its
    neighbours (contrast), or by their variance."""

    CONTRAST = "contrast"
    VARIANCE = "variance"


@dataclass(frozen=True, slots=True)
class Media:
    """A compressed video or image file; or a list of frames as a video (hippo/media/frame_list).

    With ``path`` the service opens the file itself; ``data`` is then empty, and the file must have
    the given size and time of its last change. ``uuid`` is the client's name of the content.
    """

    kind: MediaKind
    data: bytes = field(default=b"", repr=False)
    path: str = ""
    num_bytes: int = 0  # size of the file at ``path``
    modified_ns: int = 0  # last change of that file, since the epoch, modulo 2**64
    uuid: str = ""  # empty: the content is the key of caches


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A reference to an item of the request's media by its index."""

    media_index: int


ContentPart = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One chat turn; role is "system", "user" or "assistant"."""

    role: str
    content: tuple[ContentPart, ...]
    thought: str = ""  # of an assistant, before its content


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
    min_tokens: int = 0  # end tokens are excluded at completion indices below min_tokens
    grammar: str = ""  # the completion's form, as llguidance takes it; empty: any text


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Which frames of a video are sampled, and their size; 0: the model's default or the operator's
    limit. ``num_frames`` evenly spaced frames exclude ``fps``."""

    fps: float = 0.0
    min_frames: int = 0
    max_frames: int = 0
    max_pixels: int = 0  # in a frame or image after resizing
    num_frames: int = 0
    min_pixels: int = 0  # in a frame or image after resizing
    max_visual_tokens: int = 0  # in all videos of the request together
    background: int = 0  # behind transparent pixels: 1 + 0xRRGGBB; 0: white


@dataclass(frozen=True, slots=True)
class MediaUse:
    """What the model sees of one media item."""

    kind: MediaKind
    num_frames: int  # sampled; 1 for an image
    width: int  # pixels of a frame after resizing
    height: int
    num_tokens: int  # visual tokens of the item
    visual_grid: tuple[int, ...] = ()  # frames, rows, columns of a video's prunable tokens
    frame_seconds: tuple[float, ...] = ()  # time of each sampled frame of a video
    notes: tuple[str, ...] = ()  # which parts of the file could not be used, a sentence each


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which visual tokens the draft sees.

    ``ratio`` is the share of dropped tokens, 0 to 0.99. If a prompt has fewer than
    ``min_visual_tokens`` visual tokens, all are kept. Fewer are kept than either says if a slot of
    the draft, which caches ``draft_cache_tokens`` tokens (0: not told), has no room for more. Three
    are the target's own if they are None: the spatial score; the share of holistic's kept tokens
    that is spaced evenly; the share of the layers, from the first on, that score tokens.
    ``causal_attention`` scores by the model's own attention in all text behind the videos, instead
    of the question's to the visual tokens alone. With ``compacted_positions`` the draft numbers the
    tokens of a pruned prompt consecutively, instead of keeping their positions.
    """

    strategy: PruningStrategy = PruningStrategy.UNIFORM
    ratio: float = PRUNING_RATIO
    seed: int = 0
    min_visual_tokens: int = 0
    spatial_score: SpatialScore | None = None
    spread: float | None = None
    score_layer_share: float | None = None
    draft_cache_tokens: int = 0
    causal_attention: bool = False
    compacted_positions: bool = False


@dataclass(frozen=True, slots=True)
class StepLimits:
    """When its device is free, the verifier waits at most ``wait_ns`` for ``min_draft_tokens`` and
    then verifies at most ``max_draft_tokens`` (0: target-only) in one forward."""

    min_draft_tokens: int = 0
    max_draft_tokens: int = 0
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The limits of both sides.

    The verifier steps under ``optimistic`` after a whole block was accepted and under
    ``conservative`` after a rejection. The drafter drafts at most ``max_ahead`` tokens beyond the
    last commit that it received, and sends blocks of ``block_size`` tokens. After a rejection the
    verifier does not wait, but verifies at most ``max_reused`` tokens that the broken run had
    after its wrong token, if it has such tokens and none of the next run. When the drafter can go
    no further ahead, it drafts at most ``max_branched`` tokens in branches.
    """

    optimistic: StepLimits = StepLimits()
    conservative: StepLimits = StepLimits()
    max_ahead: int = 0
    block_size: int = 1
    max_reused: int = 0
    max_branched: int = 0


TARGET_ONLY = Pace()


@dataclass(frozen=True, slots=True)
class Branch:
    """What the draft goes on with if the target's token at ``index`` is ``token_ids[0]``, the
    draft's second choice."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of draft tokens; ``start_index`` is the completion index of the first. A block of
    branches alone has no tokens and is exhausted."""

    epoch: int
    start_index: int
    token_ids: tuple[int, ...]
    is_exhausted: bool = False  # the draft sends nothing more until the next commit
    step_ns: int = 0  # device time per draft token, running mean
    wait_ns: int = 0  # idle time of the draft's device before this block
    guessed_places: tuple[int, ...] = ()  # places of tokens that stood in a guess of the draft
    branches: tuple[Branch, ...] = ()  # the run's; each replaces an earlier branch at its index
    is_from_branch: bool = False  # the first block of a run that began with a branch


@dataclass(frozen=True, slots=True)
class Timing:
    """Device times of one step or prefill, in nanoseconds."""

    queue_ns: int = 0
    forward_ns: int = 0
    wait_ns: int = 0  # time that the device waited for the other side
    num_rows: int = 0  # this sequence's
    context_length: int = 0  # cached tokens before the rows; of a prefill: reused tokens
    num_sequences: int = 0  # in the forward, including this sequence; 0: unknown
    num_batch_rows: int = 0  # rows of all sequences in the forward
    vision_ns: int = 0  # part of a prefill's forward_ns that the vision tower took
    helper_ns: int = 0  # of a prefill: how long the prefill helper worked
    helper_wait_ns: int = 0  # before: from the start of the prefill's device work


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability, by log-softmax of the target model's unchanged logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a target forward settled: accepted draft tokens, then the target's own."""

    epoch: int  # after this verdict
    start_index: int  # completion index of the first id
    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0  # in the forward, without reused ones
    num_accepted_tokens: int = 0
    is_rejection: bool = False  # the run ended here, and its queued tokens are dropped
    num_dropped_tokens: int = 0  # draft tokens dropped since the last verdict
    finish_reason: FinishReason | None = None
    timing: Timing = Timing()
    is_conservative: bool = False  # the forward ran under the conservative limits
    num_reused_tokens: int = 0  # in the forward: tokens of a broken run
    num_accepted_reused: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asked for them


@dataclass(frozen=True, slots=True)
class Commit:
    """Settled tokens, sent to the draft."""

    epoch: int
    start_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """A service's facts about a prompt."""

    prompt_hash: bytes
    num_prompt_tokens: int
    num_visual_tokens: int  # only prunable tokens
    queue_ns: int = 0
    preprocess_ns: int = 0
    media: tuple[MediaUse, ...] = ()  # in the order of OpenRequest.media
    is_thinking: bool = False  # the prompt ends inside a thought


@dataclass(frozen=True, slots=True)
class Selection:
    """The visual tokens that the draft sees, as ascending indices into the prunable tokens."""

    kept_indices: tuple[int, ...]
    num_visual_tokens: int
    score_ns: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """The draft computes nothing before the selection: the target's helper uses its device."""


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
    committed_ids: tuple[int, ...] = ()  # settled ids, for a draft that joins in mid-answer
    epoch: int = 0
    cache_salt: str = ""  # cached data is shared only among requests with the same salt
    num_top_logprobs: int | None = None  # per token; None: no log-probabilities
    without_guesses: bool = False  # the draft feeds no guesses
    is_max_tokens_default: bool = False  # lower max_tokens to the rest of the context if necessary
    must_not_wait: bool = False  # the target refuses the sequence if no slot is free
    allow_special_tokens: bool = False  # names of control tokens in texts become control tokens
    client: str = ""  # clients take turns in the services' decoders; all without a name are one
    template_values: str = ""  # JSON object, by ModelInfo.template_names; empty: none


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a service serves."""

    name: str
    family: str
    device: str
    dtype: str
    tokenizer_hash: bytes
    tokenizer_json: bytes = field(repr=False)
    num_token_ids: int  # width of the logits after padding is cut off
    end_token_ids: tuple[int, ...]
    max_context_length: int
    num_slots: int
    num_parameters: int
    protocol_version: int = PROTOCOL_VERSION
    device_uuids: tuple[str, ...] = ()  # the GPUs', equal in all processes and containers
    media_dirs: tuple[str, ...] = ()  # whose files the service opens by Media.path
    video_hash: bytes = b""  # hash of how a video becomes prompt ids; empty: not told
    takes_grammars: bool = False  # whether SamplingParams.grammar takes effect
    cache_tokens: int = 0  # tokens that a draft's slot caches; 0: the whole context
    frame_sampling: str = ""  # JSON of max_frames and hippo.media.resizing.FrameLimits; "": unknown
    template_names: tuple[str, ...] = ()  # what a request may give the chat template

    @property
    def slot_tokens(self) -> int:
        """Number of tokens that a slot caches."""
        return self.cache_tokens or self.max_context_length
