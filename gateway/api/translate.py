"""Translates a request's fields to the services' protocol and to its plan of speculative decoding,
and the fields named in the services' errors back to the client's names."""

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gateway.answer.plan import SpeculationPlan
from gateway.api import media_fields
from gateway.api.media_schemas import field_error
from gateway.api.schemas import ChatCompletionRequest, SpeculationOptions
from gateway.api.structured import constrained_by
from gateway.common.config import GatewaySettings
from hippo.base.local_files import shorten
from hippo.base.validation import validate_sampling
from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
from hippo.speculation.policies import DEFAULT_GAMMA, MAX_DRAFT_TOKENS
from hippo.types import (
    ChatMessage,
    MediaPart,
    ModelInfo,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    SpatialScore,
    TextPart,
)

NO_PRUNING = Pruning(PruningStrategy.NONE)
_MOST_DIGITS = 10  # digits of a token id
# Drawn seeds are exact as a double, so that every JSON reader can send them back.
_SEED_BITS = 53
_SAMPLING_FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
_HOLISTIC = Pruning(
    PruningStrategy.HOLISTIC,
    ratio=0.9,
    spatial_score=SpatialScore.VARIANCE,
    spread=0.0,
    score_layer_share=1.0,
)
_TWO_STAGES = Pruning(
    PruningStrategy.SPECVLM,
    ratio=0.9,
    score_layer_share=1.0,
    causal_attention=True,
    compacted_positions=True,
)
PRESETS = {
    "hippo": SpeculationPlan("vpsd", "auto", MAX_DRAFT_TOKENS, _HOLISTIC, guesses=False),
    "specvlm": SpeculationPlan(
        "serial", DEFAULT_GAMMA, MAX_DRAFT_TOKENS, _TWO_STAGES, guesses=False
    ),
}
"""Published systems, which override the operator's defaults. docs/algorithms.md says how hippo's
form of each system differs from its publication."""


def template_values(request: ChatCompletionRequest, info: ModelInfo) -> dict[str, Any]:
    """Returns what the request gives the chat template; an effort, as in vLLM, also says whether
    the model thinks. Raises InvalidRequestError for what the template does not know."""
    known, given = info.template_names, dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort not in (None, "none"):
        if "reasoning_effort" not in known:
            raise field_error(
                "reasoning_effort",
                f"is {effort}, but the chat template of {info.name} knows no efforts; leave it out",
            )
        given.setdefault("reasoning_effort", effort)
    if effort is not None and (effort == "none" or "enable_thinking" in known):
        given.setdefault("enable_thinking", effort != "none")
    for name, value in given.items():
        if name == "enable_thinking":
            if not isinstance(value, bool):
                raise field_error(f"chat_template_kwargs.{name}", "must be true or false")
            continue  # without such a switch, the services refuse what the template does not do
        if name not in known:
            names = ", ".join(known) or "none"
            why = f"is not known to the chat template of {info.name}; its names are: {names}"
            raise field_error(f"chat_template_kwargs.{shorten(name)}", why)
    return given


def _chat_messages(
    request: ChatCompletionRequest, *, keeps_thoughts: bool
) -> tuple[ChatMessage, ...]:
    """Returns the conversation, with the media numbered in order. Templates leave out the thoughts
    before the last question, except those that ``keeps_thoughts``; they take no room then."""
    messages = []
    numbers = itertools.count()
    last = max((i for i, each in enumerate(request.messages) if each.role == "user"), default=-1)
    for i, message in enumerate(request.messages):
        if not message.content:
            raise InvalidRequestError("the message is empty", param=f"messages.{i}.content")
        role = "system" if message.role == "developer" else message.role
        parts = (
            TextPart(part.text or "") if part.media is None else MediaPart(next(numbers))
            for part in message.content
        )
        thought = message.thought if keeps_thoughts or i > last else ""
        messages.append(ChatMessage(role, tuple(parts), thought))
    return tuple(messages)


def _sampling_params(
    request: ChatCompletionRequest, info: ModelInfo, settings: GatewaySettings
) -> SamplingParams:
    """Returns the validated parameters of the token rule; a checkpoint's generation configuration
    is not used."""
    # A request without a seed gets a random one; negative seeds wrap as 64-bit integers.
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed % 2**64
    biases = []
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isdecimal() and len(key) <= _MOST_DIGITS):
            why = f"names token {shorten(key)!r}; token ids are whole numbers"
            raise field_error("logit_bias", why)
        biases.append((int(key), bias))
    given = request.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    defaults = {"temperature": settings.default_temperature, "top_p": settings.default_top_p}
    params = SamplingParams(logit_bias=tuple(biases), seed=seed, **{**defaults, **given})
    validate_sampling(params, num_token_ids=info.num_token_ids)
    return params


def open_request(
    request: ChatCompletionRequest,
    *,
    request_id: str,
    plan: SpeculationPlan,
    info: ModelInfo,
    settings: GatewaySettings,
    owner: str | None = None,
    client: str = "",
    grammar: str = "",
) -> OpenRequest:
    """Returns the first message for both services, without the media and the coordinator's pace.

    ``owner`` is the name of its API key, ``client`` who waits for turns with others, and
    ``grammar`` its own, checked. Raises InvalidRequestError, which names the field at fault.
    """
    sampling = replace(_sampling_params(request, info, settings), grammar=grammar)
    max_tokens, is_default = _max_tokens(request, info, settings)
    if sampling.min_tokens > max_tokens:
        what = "this server's default limit" if is_default else _limit_field(request)
        raise field_error(
            "min_tokens", f"is {sampling.min_tokens}, more than {what} ({max_tokens})"
        )
    values = template_values(request, info)
    keeps = "preserve_thinking" in info.template_names and values.get("preserve_thinking", True)
    salt = request.cache_salt or ""
    if owner is not None and not settings.share_caches:  # no two keys have the same
        salt = hashlib.sha256(repr((owner, salt)).encode()).hexdigest()
    return OpenRequest(
        request_id=request_id,
        messages=_chat_messages(request, keeps_thoughts=bool(keeps)),
        media=(),
        sampling=sampling,
        frame_plan=media_fields.frame_plan(request),
        # Without a draft, the target need not score visual tokens.
        pruning=plan.pruning if plan.wants_draft and settings.draft else NO_PRUNING,
        max_tokens=max_tokens,
        end_token_ids=_end_token_ids(request, info),
        cache_salt=salt,
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        without_guesses=not plan.guesses,
        is_max_tokens_default=is_default,
        allow_special_tokens=bool(request.allow_special_tokens),
        client=client,
        template_values=json.dumps(values) if values else "",
    )


def num_choices(request: ChatCompletionRequest, settings: GatewaySettings) -> int:
    """Returns the number of choices. Raises InvalidRequestError above the operator's limit."""
    count = request.n or 1
    if count > settings.max_choices:
        raise field_error(
            "n", f"is {count}; this server gives at most {settings.max_choices} choices"
        )
    return count


def in_clients_words(
    error: InvalidRequestError, request: ChatCompletionRequest
) -> InvalidRequestError:
    """Returns a service's error with the client's name of the field at fault in its message and
    ``param``; for an item of media in ``param`` alone, since the message may hold its path."""
    items = [field for field, *_ in media_fields.media_parts(request)]
    names = {
        "max_tokens": _limit_field(request),
        "sampling.grammar": constrained_by(request) or "response_format",
        **media_fields.frame_fields(request)[1],
    }
    if isinstance(error, MediaError) and error.param is None and len(items) == 1:
        return MediaError(error.message, param=items[0])
    places = {f"media[{index}]": field for index, field in enumerate(items)}
    if error.param in places:
        return type(error)(error.message, param=places[error.param])
    if error.param not in names:
        return error
    name, pattern = names[error.param], r"(?<![\w.])" + re.escape(error.param) + r"(?!\w)"
    return type(error)(re.sub(pattern, name, error.message), param=name)


def _max_tokens(
    request: ChatCompletionRequest, info: ModelInfo, settings: GatewaySettings
) -> tuple[int, bool]:
    """Returns the token limit, and whether it is the operator's default.

    The services, which know the prompt's length, reduce a default that does not fit the context.
    """
    given = request.max_completion_tokens or request.max_tokens
    if given is None:
        return min(settings.default_max_tokens, info.max_context_length // 2), True
    if given > info.max_context_length:
        name = _limit_field(request)
        raise ContextLengthError(
            f"{name} is {given}; {info.name} takes {info.max_context_length} tokens, prompt "
            f"and completion together: lower {name}, or start the services with a larger "
            "--max-context-length",
            param=name,
        )
    return given, False


def _end_token_ids(request: ChatCompletionRequest, info: ModelInfo) -> tuple[int, ...]:
    ends: Collection[int] = () if request.ignore_eos else info.end_token_ids
    given = request.stop_token_ids or ()
    for token_id in given:
        if not 0 <= token_id < info.num_token_ids:
            why = f"names token {token_id}; token ids are 0 to {info.num_token_ids - 1}"
            raise field_error("stop_token_ids", why)
    return tuple(dict.fromkeys((*ends, *given)))


def _limit_field(request: ChatCompletionRequest) -> str:
    """Returns which of OpenAI's two names for the token limit the client has used."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def speculation_plan(
    options: SpeculationOptions | None, settings: GatewaySettings
) -> SpeculationPlan:
    """Returns the plan of a request: its options override its preset, which overrides the defaults.

    Raises InvalidRequestError for values that the operator does not allow.
    """
    options = options or SpeculationOptions()
    most = settings.max_draft_tokens
    given = options.model_dump(include={"gamma", "max_draft_tokens", "guesses"}, exclude_none=True)
    for name, value in given.items():
        if isinstance(value, int) and value > most:
            raise field_error(f"speculative.{name}", f"is {value}; this server allows {most}")
    by_default = Pruning(
        PruningStrategy(settings.pruning_strategy),
        settings.pruning_ratio,
        min_visual_tokens=settings.pruning_min_visual_tokens,
    )
    default = SpeculationPlan(settings.policy, settings.gamma, most, by_default)
    plan = PRESETS[options.preset] if options.preset else default
    plan = replace(
        plan,
        policy_name=options.policy or plan.policy_name,
        pruning=_pruning(options, plan.pruning, settings.allowed_pruning_strategies),
        is_default=not (
            options.preset or options.policy or options.gamma or options.max_draft_tokens
        ),
        **{"max_draft_tokens": most, **given},
    )
    return plan if plan.gamma == "auto" else replace(plan, gamma=min(plan.gamma, most))


def _pruning(options: SpeculationOptions, published: Pruning, allowed: Sequence[str]) -> Pruning:
    given = options.pruning.model_dump(exclude_none=True)
    if given.keys() & {"strategy", "ratio"}:  # whoever says how to prune wants it of any prompt
        given.setdefault("min_visual_tokens", 0)
    pruning = replace(published, **given)
    name = pruning.strategy.value
    if name not in allowed:  # the operator's default is, so the request named this strategy
        field, asked = "pruning.strategy", name
        if options.pruning.strategy is None:
            field, asked = "preset", f"{options.preset} (strategy {name})"
        why = f"is {asked}; this server allows the strategies {', '.join(allowed)}"
        raise field_error(f"speculative.{field}", why)
    return pruning
