"""Models of the routes' answers.

Chat completions are written by ``gateway.api.sse`` without these models, for speed; here the models
serve the OpenAPI description, and tests check real answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.event_schemas import StreamEvent
from hippo.base.validation import MAX_TOP_LOGPROBS


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str = Field(description="What was wrong and, if known, what is expected.")
    type: str
    param: str | None = Field(description="The path of the field at fault.")
    code: str | None


class ErrorResponse(BaseModel):
    """The answer to a failed request; also the last event of a stream that failed."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "message": "temperature is 3.0; it must be 0 to 2",
                        "type": "invalid_request_error",
                        "param": "temperature",
                        "code": "invalid_value",
                    }
                }
            ]
        }
    )

    error: ErrorDetail


class MediaUsage(BaseModel):
    """What the model sees of one video or image."""

    type: Literal["video", "image"]
    num_frames: int = Field(description="Sampled frames; 1 for an image.", examples=[32])
    width: int = Field(description="Of a frame after resizing, in pixels.", examples=[448])
    height: int = Field(description="Of a frame after resizing, in pixels.", examples=[448])
    num_tokens: int = Field(description="Visual tokens.", examples=[4096])
    notes: list[str] = Field(
        description="What of the file could not be used, a sentence each.",
        examples=[["the file is cut off behind 310 of its 480 frames"]],
    )


class PromptTokensDetails(BaseModel):
    """Prompt tokens whose keys and values the target had cached, and the request's media."""

    cached_tokens: int
    media: list[MediaUsage] = Field(description="In the order of the request.")


class UsageResponse(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(examples=[1168])
    completion_tokens: int = Field(examples=[136])
    total_tokens: int = Field(examples=[1304])
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(BaseModel):
    """Counts and rates of draft tokens, with the names of vLLM."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(BaseModel):
    """Times and rates with the names of vLLM; docs/api.md explains each field."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class PruningFigures(BaseModel):
    """How the draft's visual tokens were chosen, and how many it saw."""

    strategy: str
    ratio: float
    num_visual_tokens: int | None
    num_kept_tokens: int | None


class CachedTokens(BaseModel):
    """Prompt tokens whose keys and values each service had cached."""

    target: int
    draft: int | None


class Figures(BaseModel):
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
    acceptance_rate: float
    acceptance_per_position: list[float]
    mean_tokens_per_forward: float
    mean_run_length: float
    timings_ms: dict[str, float | None]
    timeline_ms: dict[str, list[dict[str, Any]]] = Field(
        default={}, description="Every verdict and block; only with return_timeline."
    )


FinishReasonName = Literal["stop", "length"]


class AssistantMessage(BaseModel):
    """The answer's text."""

    role: Literal["assistant"]
    content: str = Field(examples=["A red ball rolls to the right."])
    refusal: None


class Likelihood(BaseModel):
    """The target's log-probability of a token."""

    token: str = Field(description="Text; U+FFFD stands for bytes that form no character.")
    logprob: float = Field(le=0, description="-9999 for a token that the model rules out.")
    bytes: list[int] = Field(description="The token's bytes (UTF-8).")


class TokenLikelihood(Likelihood):
    """Log-probabilities of a token of the answer and of the likeliest tokens at its place."""

    top_logprobs: list[Likelihood] = Field(max_length=MAX_TOP_LOGPROBS)


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of the tokens that begin in the content."""

    content: list[TokenLikelihood]
    refusal: None


class AnswerChoice(BaseModel):
    """One choice of an answer."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = Field(description="Null without logprobs.")
    finish_reason: FinishReasonName
    token_ids: list[int] = Field(default=[], description="Only with return_token_ids.")
    hippo: Figures | None = Field(default=None, description="Only if n is above 1.")
    metrics: AnswerMetrics | None = Field(default=None, description="Only if n is above 1.")


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str = Field(examples=["chatcmpl-0f6e"])
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since the epoch.", examples=[1795278000])
    model: str = Field(examples=["hippo"])
    choices: list[AnswerChoice] = Field(description="`n` choices, by index.")
    usage: UsageResponse
    hippo: Figures = Field(description="Of the first choice.")
    metrics: AnswerMetrics


class Delta(BaseModel):
    """New text of a choice; the first chunk has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """New text of one choice."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = Field(
        description="Of the tokens that begin in this text; null without logprobs."
    )
    finish_reason: FinishReasonName | None
    token_ids: list[int] = Field(default=[], description="In the last chunk; if asked for.")
    events: list[StreamEvent] = Field(default=[], description="Only with return_events.")


class ChatCompletionChunk(BaseModel):
    """An event of a stream; each choice's last one has a finish reason, `hippo` and `metrics`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty in the chunk with the usage alone.")
    usage: UsageResponse | None = Field(default=None, description="With include_usage.")
    hippo: Figures | None = None
    metrics: AnswerMetrics | None = None


class VideoCard(BaseModel):
    """An uploaded video; requests can name its id as the url of a video_url."""

    id: str = Field(examples=["video-3f0c9f5a1b2c4d5e8f90a1b2c3d4e5f6"])
    object: Literal["video"] = "video"
    bytes: int
    created_at: int = Field(description="Seconds since the epoch.")
    expires_at: int = Field(description="Seconds since the epoch.")
    filename: str


class VideoDeleted(BaseModel):
    """Confirms that an uploaded video was deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int = Field(examples=[3])
    max_model_len: int = Field(examples=[4096])
    tokens: list[int] = Field(examples=[[264, 2518, 4935]])
    token_strs: list[str] | None = Field(description="Null without return_token_strs.")


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str = Field(examples=["A red ball"])


class Health(BaseModel):
    """The gateway's process is alive."""

    status: Literal["ok"] = "ok"


class NumUp(BaseModel):
    """How many services there are, and how many of them serve."""

    up: int
    all: int


class Ready(BaseModel):
    """The gateway can answer requests."""

    status: Literal["ready"] = "ready"
    model: str
    draft: Literal["ready", "unavailable"]
    draft_problem: str | None
    num_targets: NumUp
    num_drafts: NumUp


class Versions(BaseModel):
    """The versions of the software and of the protocol between gateway and services."""

    version: str
    protocol_version: int
