"""Models of the routes' answers.

Chat completions are written by ``gateway.api.sse`` without these models, for speed; here the models
serve the OpenAPI description, and tests check real answers against them.
"""

from typing import Literal

from pydantic import Field

from gateway.answer.event_schemas import StreamEvent
from gateway.answer.figures import AnswerMetrics, Described, Figures, UsageResponse
from hippo.base.validation import MAX_TOP_LOGPROBS


class ErrorDetail(Described):
    """OpenAI's error object."""

    message: str = Field(examples=["temperature is 3.0; it must be 0 to 2"])
    """What was wrong and, if known, what is expected."""
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["temperature"])
    """The path of the field at fault."""
    code: str | None = Field(examples=["invalid_value"])


class ErrorResponse(Described):
    """The answer to a failed request; also the last event of a stream that failed."""

    error: ErrorDetail


FinishReasonName = Literal["stop", "length"]


class AssistantMessage(Described):
    """The answer's text."""

    role: Literal["assistant"]
    content: str = Field(examples=["A red ball rolls to the right."])
    refusal: None
    reasoning: str = ""
    """What the model thought before; only if it did."""
    reasoning_content: str = ""
    """The same."""


class Likelihood(Described):
    """The target's log-probability of a token."""

    token: str
    """Text; U+FFFD stands for bytes that form no character."""
    logprob: float = Field(le=0)
    """-9999 for a token that the model rules out."""
    bytes: list[int]
    """The token's bytes (UTF-8)."""


class TokenLikelihood(Likelihood):
    """Log-probabilities of a token of the answer and of the likeliest tokens at its place."""

    top_logprobs: list[Likelihood] = Field(max_length=MAX_TOP_LOGPROBS)


class ChoiceLogprobs(Described):
    """Log-probabilities of the tokens that begin in the content."""

    content: list[TokenLikelihood]
    refusal: None


class AnswerChoice(Described):
    """One choice of an answer."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    """Null without logprobs."""
    finish_reason: FinishReasonName
    token_ids: list[int] = Field(default=[])
    """Only with return_token_ids."""
    hippo: Figures | None = None
    """Only if n is above 1."""
    metrics: AnswerMetrics | None = None
    """Only if n is above 1."""


class ChatCompletion(Described):
    """A whole answer."""

    id: str = Field(examples=["chatcmpl-0f6e"])
    object: Literal["chat.completion"]
    created: int = Field(examples=[1795278000])
    """Seconds since the epoch."""
    model: str = Field(examples=["hippo"])
    choices: list[AnswerChoice]
    """`n` choices, by index."""
    usage: UsageResponse
    hippo: Figures
    """Of the first choice."""
    metrics: AnswerMetrics


class Delta(Described):
    """New text of a choice; the first chunk has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str = ""
    """A part of the thought, before any content."""
    reasoning_content: str = ""
    """The same."""


class ChunkChoice(Described):
    """New text of one choice."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    """Of the tokens that begin in this text; null without logprobs."""
    finish_reason: FinishReasonName | None
    token_ids: list[int] = Field(default=[])
    """In the last chunk; if asked for."""
    events: list[StreamEvent] = Field(default=[])
    """Only with return_events."""


class ChatCompletionChunk(Described):
    """An event of a stream; each choice's last one has a finish reason, `hippo` and `metrics`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    """Empty in the chunk with the usage alone."""
    usage: UsageResponse | None = None
    """With include_usage."""
    hippo: Figures | None = None
    metrics: AnswerMetrics | None = None


class VideoCard(Described):
    """An uploaded video; requests can name its id as the url of a video_url."""

    id: str = Field(examples=["video-3f0c9f5a1b2c4d5e8f90a1b2c3d4e5f6"])
    object: Literal["video"] = "video"
    bytes: int
    created_at: int
    """Seconds since the epoch."""
    expires_at: int
    """Seconds since the epoch."""
    filename: str


class VideoDeleted(Described):
    """Confirms that an uploaded video was deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class TokenizeResponse(Described):
    """The tokens of a text."""

    count: int = Field(examples=[3])
    max_model_len: int = Field(examples=[4096])
    tokens: list[int] = Field(examples=[[264, 2518, 4935]])
    token_strs: list[str] | None
    """Null without return_token_strs."""


class DetokenizeResponse(Described):
    """The text of tokens."""

    prompt: str = Field(examples=["A red ball"])


class Health(Described):
    """The gateway's process is alive."""

    status: Literal["ok"] = "ok"


class NumUp(Described):
    """How many services there are, and how many of them serve."""

    up: int
    all: int


class Ready(Described):
    """The gateway can answer requests."""

    status: Literal["ready"] = "ready"
    model: str
    draft: Literal["ready", "unavailable"]
    draft_problem: str | None
    num_targets: NumUp
    num_drafts: NumUp


class Versions(Described):
    """The versions of the software and of the protocol between gateway and services."""

    version: str
    protocol_version: int


class DraftCard(Described):
    """The model of the draft service."""

    name: str
    num_parameters: int
    device: str
    dtype: str


class ServiceCard(Described):
    """A draft or target service of the gateway."""

    service: Literal["target", "draft"]
    id: str
    """By the order of the gateway's list; its address is not told."""
    is_up: bool
    problem: str | None
    num_running: int
    """Running sequences of this gateway."""
    num_slots: int | None


class ModelFacts(Described):
    """The model and the services behind a served name."""

    family: str
    num_parameters: int
    device: str
    dtype: str
    num_slots: int
    draft: DraftCard | None
    draft_problem: str | None
    """Why there is no draft; null if there is one."""
    services: list[ServiceCard]


class ModelCard(Described):
    """A served model."""

    id: str = Field(examples=["hippo"])
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "hippo"
    max_model_len: int = Field(examples=[4096])
    """Maximum number of tokens of prompt and answer together."""
    hippo: ModelFacts


class ExpectedFrames(Described):
    """What a model sees of a video by default."""

    num_frames: int
    width: int
    """Of a frame, after resizing."""
    height: int
    num_tokens: int
    """Visual tokens, of all frames together; approximate."""


class ModelList(Described):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
