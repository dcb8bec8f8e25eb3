"""The request of POST /v1/chat/completions, field by field.

A field takes effect or is refused by name; gateway.api.neutral has the values that change nothing.
hippo.base.validation checks the ranges of sampling values.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from gateway.api.media_schemas import (
    ContentPart,
    Float,
    Int,
    MediaLoading,
    MediaProcessing,
    Model,
    refusal,
    refusal_of,
)
from gateway.api.neutral import MESSAGE, REQUEST, Neutral
from gateway.api.structured import StructuredFields, constrained_by
from hippo.base.validation import MAX_TOP_LOGPROBS
from hippo.types import PruningStrategy, SpatialScore

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_SALT_LENGTH = 256
MAX_MESSAGES = 1024
_TEMPLATE_WORD = re.compile(r"[\w .,+-]{0,64}")  # no control token's name
_ONLY_STREAMS = "is only for streams; set stream to true or leave it out"
_VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}
_TURN = {"role": "user", "content": [_VIDEO, {"type": "text", "text": "Describe the video."}]}
_EXAMPLE: Any = {"model": "hippo-demo", "messages": [_TURN], "temperature": 0, "stream": True}


class Message(Model):
    """One message of the conversation."""

    absent: ClassVar[list[Any]] = [None, []]
    neutral: ClassVar[Mapping[str, Neutral]] = MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        tuple[ContentPart, ...],
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[ContentPart] | None,
        ),
    ]

    reasoning: str | None = None
    """What the assistant thought before it answered; vLLM's name."""
    reasoning_content: str | None = None
    """The same; vLLM's earlier name."""

    @property
    def thought(self) -> str:
        return self.reasoning or self.reasoning_content or ""

    @model_validator(mode="after")
    def _only_answers_have_thoughts(self) -> "Message":
        if self.thought and self.role != "assistant":
            raise refusal("reasoning is of messages with the role assistant only")
        if self.reasoning and self.reasoning_content not in (None, "", self.reasoning):
            raise refusal("reasoning and reasoning_content differ; give one of them")
        return self

    @model_validator(mode="before")
    @classmethod
    def _an_answer_may_be_empty(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") == "assistant":
            if value.get("content") is None:
                return {**value, "content": ""}
        return value


class StreamOptions(Model):
    """Options of a stream."""

    include_usage: StrictBool = False
    """The stream ends with a usage chunk."""
    continuous_usage_stats: StrictBool = False
    """Each chunk has the usage so far, as in vLLM; needs include_usage."""
    include_obfuscation: StrictBool | None = None
    """Inert; nothing is added to the chunks."""

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise refusal(
                "continuous_usage_stats needs include_usage: set include_usage to true as well"
            )
        return self


class PruningOptions(Model):
    """How the visual tokens that the draft sees are chosen; the answer does not depend on them."""

    strategy: PruningStrategy | None = None
    ratio: Float | None = Field(default=None, ge=0, le=0.99)
    """Share that is dropped."""
    seed: Int = Field(default=0, ge=0, lt=2**64)
    """Seed of the random strategy."""
    min_visual_tokens: Int | None = Field(default=None, ge=0, lt=2**32)
    """Prompts with fewer are not pruned."""
    spatial_score: SpatialScore | None = None
    """Of holistic; the HIPPO paper has variance."""
    spread: Float | None = Field(default=None, ge=0, le=1)
    """Share of holistic's kept tokens that is spaced evenly; the HIPPO paper has 0."""
    score_layer_share: Float | None = Field(default=None, gt=0, le=1)
    """Share of the target's layers, from the first on, that score tokens."""
    causal_attention: StrictBool | None = None
    """Tokens are scored by the attention of all text behind the videos to all tokens before it, as
    in SpecVLM; by default by the attention of the question to visual tokens alone."""
    compacted_positions: StrictBool | None = None
    """The draft numbers the tokens of a pruned prompt consecutively, as in SpecVLM; by default they
    keep their positions."""


def _draft_length(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:  # has an entry for each type of the union
        raise refusal(f'expected a number of at least 1, or "auto", not {value!r:.60}') from None


class SpeculationOptions(Model):
    """Options of speculative decoding; the answer does not depend on them."""

    preset: Literal["hippo", "specvlm"] | None = None
    """A published system, with all its options; other fields override them. hippo: holistic pruning
    of 0.9 by the published scores, vpsd. specvlm: two-stage pruning of 0.9 by causal attention,
    compacted positions, and serial decoding of a chain (the publication decodes a tree of 25
    nodes)."""
    policy: Literal["off", "serial", "vpsd", "adaptive", "optimistic", "conservative"] | None = None
    gamma: Annotated[
        Annotated[Int, Field(ge=1)] | Literal["auto"] | None, WrapValidator(_draft_length)
    ] = None
    """Draft length of serial and vpsd; "auto": the measured time of a target step over the
    time of a draft step."""
    max_draft_tokens: Int | None = Field(default=None, ge=1)
    """Maximum number of draft tokens that one forward verifies."""
    guesses: StrictBool | None = None
    """Whether the draft feeds guesses by n-grams; by default it does."""
    pruning: PruningOptions = PruningOptions()


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        is_word = isinstance(value, str) and _TEMPLATE_WORD.fullmatch(value)
        if not (is_word or value is None or isinstance(value, bool | int | float)):
            raise refusal(
                f"{name:.60} is neither true, false, a number nor a word (letters, digits, spaces "
                "and .,+-, at most 64)"
            )
    return {name: value for name, value in values.items() if value is not None}


class ChatCompletionRequest(StructuredFields):
    """A chat completion request."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    neutral: ClassVar[Mapping[str, Neutral]] = REQUEST

    model: str
    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES)

    max_tokens: Int | None = Field(default=None, ge=1)
    max_completion_tokens: Int | None = Field(default=None, ge=1)
    min_tokens: Int | None = Field(default=None, ge=0)
    """No end token or stop string ends an answer with fewer tokens."""
    temperature: Float | None = None
    """0 is greedy; the default is the operator's, 1 unless changed."""
    top_p: Float | None = None
    """The default is the operator's, 1 unless changed."""
    top_k: Int | None = None
    """0 or -1 keeps all tokens."""
    min_p: Float | None = None
    seed: Int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """By default a random seed is drawn, reported as `hippo.seed`."""
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: dict[str, Float] | None = None
    ignore_eos: StrictBool | None = None
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda value: () if value is None else (value,) if isinstance(value, str) else value,
            json_schema_input_type=str | list[str] | None,
        ),
    ] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[Int, ...] | None = Field(default=None, max_length=MAX_STOP_STRINGS)

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_plain_values)] | None = None
    """What the checkpoint's chat template is given, such as `enable_thinking`, by names that it
    knows."""
    reasoning_effort: str | None = Field(default=None, pattern="^[a-z]{1,16}$")
    """`none` is enable_thinking false; other words are the template's, if it has any."""
    include_reasoning: StrictBool | None = None
    """False leaves the thought out of the answer."""

    n: Int | None = Field(default=None, ge=1, strict=True)
    """Number of choices, limited by the operator; the first choice is the same with any n."""
    logprobs: StrictBool | None = Field(default=None, strict=True)
    """Adds the target's log-probability of each token of the text."""
    top_logprobs: Int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    """Number of likeliest tokens added at each place; needs logprobs."""

    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    """Adds `token_ids` to the choice; in a stream, to its last chunk."""
    return_timeline: StrictBool | None = None
    """Adds `timeline_ms`, every verdict and block, to `hippo`."""
    return_events: StrictBool | None = None
    """Adds `events` to the choices of a stream: what both services did, as it happens."""

    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_LENGTH)
    """Requests share cached prompts only if their salts are equal; the answer does not depend on
    it."""
    allow_special_tokens: StrictBool | None = None
    """Names of control tokens in the texts, such as `<|im_end|>`, become control tokens; by default
    they are text."""
    mm_processor_kwargs: MediaProcessing | None = None
    media_io_kwargs: MediaLoading | None = None
    speculative: SpeculationOptions | None = None

    @property
    def processing(self) -> MediaProcessing:
        return self.mm_processor_kwargs or MediaProcessing()

    @property
    def loading(self) -> MediaLoading:
        return self.media_io_kwargs or MediaLoading()

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise refusal("the request body must be a JSON object")
        if value.get("best_of") is not None and value["best_of"] == value.get("n"):
            return {name: given for name, given in value.items() if name != "best_of"}
        return value

    @model_validator(mode="after")
    def _fields_go_together(self) -> "ChatCompletionRequest":
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise refusal_of("max_completion_tokens", "and max_tokens differ; give only one")
        for name in ("stream_options", "return_events"):
            if getattr(self, name) and not self.stream:
                raise refusal_of(name, _ONLY_STREAMS)
        if self.ignore_eos and (constraint := constrained_by(self)) is not None:
            raise refusal_of(
                "ignore_eos",
                f"cannot be given together with {constraint}, because the answer ends where its "
                "form does: leave one of them out",
            )
        if self.top_logprobs and not self.logprobs:
            raise refusal_of(
                "top_logprobs", "needs logprobs: set logprobs to true, or leave top_logprobs out"
            )
        for length in map(len, self.stop):
            if not 0 < length <= MAX_STOP_LENGTH:
                allowed = f"1 to {MAX_STOP_LENGTH} are allowed"
                raise refusal_of("stop", f"has a string of {length} characters; {allowed}")
        return self
