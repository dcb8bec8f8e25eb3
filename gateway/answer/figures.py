"""The figures of an answer: its ``usage``, ``hippo`` and ``metrics`` objects."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hippo.types import MediaUse

Rounded = Annotated[float, AfterValidator(lambda value: round(value, 4))]


class Described(BaseModel):
    """A part of an answer; the text below a field describes it in /openapi.json."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ShownMedia(Described):
    """What a model sees of one video or image."""

    type: Literal["video", "image"]
    width: int = Field(examples=[448])
    """Of a frame after resizing, in pixels."""
    height: int = Field(examples=[448])
    """Of a frame after resizing, in pixels."""
    num_tokens: int = Field(examples=[4096])
    """Visual tokens."""
    notes: list[str] = Field(examples=[["the file is cut off behind 310 of its 480 frames"]])
    """What of the file could not be used, a sentence each."""


class MediaUsage(ShownMedia):
    """What the target sees of one video or image."""

    num_frames: int = Field(examples=[32])
    """Sampled frames; 1 for an image."""


class PromptTokensDetails(Described):
    """Prompt tokens whose keys and values the target had cached, and the request's media."""

    cached_tokens: int
    media: list[MediaUsage]
    """In the order of the request."""


class CompletionTokensDetails(Described):
    """Which tokens of the completions are no content."""

    reasoning_tokens: int
    """Of the thoughts, markers included."""


class UsageResponse(Described):
    """Token counts."""

    prompt_tokens: int = Field(examples=[1168])
    completion_tokens: int = Field(examples=[136])
    total_tokens: int = Field(examples=[1304])
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(Described):
    """Counts and rates of draft tokens, with the names of vLLM."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(Described):
    """Times and rates with the names of vLLM; docs/api.md explains each field."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class PruningFigures(Described):
    """How the draft's visual tokens were chosen, and how many it saw."""

    strategy: str
    ratio: float
    num_visual_tokens: int | None
    num_kept_tokens: int | None


class CachedTokens(Described):
    """Prompt tokens whose keys and values each service had cached."""

    target: int
    draft: int | None


class Timings(Described):
    """Times of an answer in milliseconds; docs/api.md explains each field."""

    media: float
    queue: float | None
    target_preprocess: float | None
    draft_preprocess: float | None
    selection: float | None
    target_prefill: float | None
    draft_prefill: float | None
    time_to_first_token: float
    first_block_after_first_token: float | None
    """Negative if the draft's first block came before the target's first token."""
    decode: float
    total: float
    target_forward: float
    target_step: float | None
    draft_step: float | None
    target_wait: float
    draft_wait: float
    optimistic: float
    conservative: float
    target_only: float
    transport_per_round: float | None


class Figures(Described):
    """Facts about speculative decoding of an answer; docs/api.md explains each field."""

    policy: str = Field(examples=["adaptive"])
    is_calibration: bool
    estimated_speedup: float | None = Field(examples=[4.72])
    seed: int
    draft_used: bool
    draft_problem: str | None
    num_draft_streams: int
    num_draft_losses: int
    pruning: PruningFigures
    num_cached_tokens: CachedTokens
    num_forwards: int
    num_drafted_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_dropped_tokens: int
    num_reused_tokens: int
    num_accepted_reused: int
    num_rejections: int
    num_branches_taken: int
    num_blocks: int
    num_stale_blocks: int
    num_mode_switches: int
    acceptance_rate: Rounded
    acceptance_per_position: list[Rounded]
    mean_tokens_per_forward: Rounded
    mean_run_length: Rounded
    timings_ms: Timings
    timeline_ms: dict[str, list[dict[str, Any]]] = {}
    """Every verdict and block; only with return_timeline."""


def ms(duration_ns: float) -> float:
    """Returns a duration in milliseconds, to the microsecond."""
    return round(duration_ns / 1e6, 3)


def shown_media(item: MediaUse) -> dict[str, Any]:
    """Returns the fields of ``ShownMedia``."""
    return {
        "type": item.kind.value,
        "width": item.width,
        "height": item.height,
        "num_tokens": item.num_tokens,
        "notes": list(item.notes),
    }
