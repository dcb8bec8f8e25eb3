"""What the routes answer, as models: those of the small routes are returned, the others documented.

Chat completions are written by ``gateway.sse`` without a model in between; the tests hold what
comes out against these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hippo.validation import MAX_TOP_LOGPROBS


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str = Field(description="What was wrong and, where it is known, what would be right.")
    type: str
    param: str | None = Field(description="The path of the field at fault.")
    code: str | None


class ErrorResponse(BaseModel):
    """Whatever went wrong; also the last event of a stream that failed."""

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


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those whose keys and values the target had already."""

    cached_tokens: int


class UsageResponse(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(examples=[1168])
    completion_tokens: int = Field(examples=[136])
    total_tokens: int = Field(examples=[1304])
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(BaseModel):
    """What vLLM's clients read about drafting."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(BaseModel):
    """Figures by the names that vLLM's clients read; docs/api.md explains each."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class PruningFigures(BaseModel):
    """Which visual tokens the draft saw."""

    strategy: str
    ratio: float
    num_visual_tokens: int | None
    num_kept_tokens: int | None


class CachedTokens(BaseModel):
    """Prompt tokens that each service had already."""

    target: int
    draft: int | None


class Figures(BaseModel):
    """How the answer came about; docs/api.md explains each."""

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
    num_rejections: int
    num_blocks: int
    num_stale_blocks: int
    num_mode_switches: int
    acceptance_rate: float
    acceptance_per_position: list[float]
    mean_tokens_per_forward: float
    mean_run_length: float
    timings_ms: dict[str, float | None]
    timeline_ms: dict[str, list[dict[str, Any]]] = Field(
        default={}, description="Every verdict and block; there with return_timeline."
    )


FinishReasonName = Literal["stop", "length"]


class AssistantMessage(BaseModel):
    """The answer's text."""

    role: Literal["assistant"]
    content: str = Field(examples=["A red ball rolls to the right."])
    refusal: None


class Likelihood(BaseModel):
    """How likely the target thought a token."""

    token: str = Field(description="U+FFFD stands for bytes that form no character.")
    logprob: float = Field(le=0, description="-9999 for one that the model rules out.")
    bytes: list[int] = Field(description="The token's own, in UTF-8.")


class TokenLikelihood(Likelihood):
    """The same of a token of the answer, and the likeliest at its place."""

    top_logprobs: list[Likelihood] = Field(max_length=MAX_TOP_LOGPROBS)


class ChoiceLogprobs(BaseModel):
    """The tokens that begin in the content."""

    content: list[TokenLikelihood]
    refusal: None


class AnswerChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = Field(description="With logprobs.")
    finish_reason: FinishReasonName
    token_ids: list[int] = Field(default=[], description="There with return_token_ids.")
    hippo: Figures | None = Field(default=None, description="Its own, where n is above 1.")
    metrics: AnswerMetrics | None = Field(default=None, description="Its own, where n is above 1.")


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str = Field(examples=["chatcmpl-0f6e"])
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since the epoch.", examples=[1795278000])
    model: str = Field(examples=["hippo"])
    choices: list[AnswerChoice] = Field(description="As many as n.")
    usage: UsageResponse
    hippo: Figures = Field(description="Of the first choice.")
    metrics: AnswerMetrics


class Delta(BaseModel):
    """Further text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """Further text of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = Field(
        description="With logprobs: of the tokens that begin in this text."
    )
    finish_reason: FinishReasonName | None
    token_ids: list[int] = Field(
        default=[], description="In the last chunk, with return_token_ids."
    )


class ChatCompletionChunk(BaseModel):
    """One event of a stream. A choice's last, with the finish reason, has `hippo` and `metrics`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty in the chunk with the usage alone.")
    usage: UsageResponse | None = Field(default=None, description="With include_usage.")
    hippo: Figures | None = None
    metrics: AnswerMetrics | None = None


class DraftCard(BaseModel):
    """The draft's model."""

    name: str
    num_parameters: int
    device: str
    dtype: str


class ServiceCard(BaseModel):
    """A service behind the gateway."""

    service: Literal["target", "draft"]
    address: str
    is_up: bool
    problem: str | None
    num_running: int = Field(description="Of this gateway's sequences.")
    num_slots: int | None


class ModelFacts(BaseModel):
    """What serves a model."""

    family: str
    num_parameters: int
    device: str
    dtype: str
    num_slots: int
    draft: DraftCard | None
    draft_problem: str | None = Field(description="Why there is no draft, if there is none.")
    services: list[ServiceCard]


class ModelCard(BaseModel):
    """A served model."""

    id: str = Field(examples=["hippo"])
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "hippo"
    max_model_len: int = Field(
        description="Most tokens of prompt and answer together.", examples=[4096]
    )
    hippo: ModelFacts


class ModelList(BaseModel):
    """What is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class VideoCard(BaseModel):
    """An uploaded video; its id can stand as the url of a video_url."""

    id: str = Field(examples=["video-3f0c9f5a1b2c4d5e8f90a1b2c3d4e5f6"])
    object: Literal["video"] = "video"
    bytes: int
    created_at: int = Field(description="Seconds since the epoch.")
    expires_at: int = Field(description="Seconds since the epoch.")
    filename: str


class VideoDeleted(BaseModel):
    """An uploaded video that is forgotten."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class TokenizeResponse(BaseModel):
    """A text's tokens."""

    count: int = Field(examples=[3])
    max_model_len: int = Field(examples=[4096])
    tokens: list[int] = Field(examples=[[264, 2518, 4935]])
    token_strs: list[str] | None = Field(description="With return_token_strs.")


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
    """Questions can be answered."""

    status: Literal["ready"] = "ready"
    model: str
    draft: Literal["ready", "unavailable"]
    draft_problem: str | None
    num_targets: NumUp
    num_drafts: NumUp


class Versions(BaseModel):
    """The software's version, and the protocol's between the services."""

    version: str
    protocol_version: int
