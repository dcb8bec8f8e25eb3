"""hippo.types to protocol messages and back; what comes in is validated here.

``*_from_proto`` raise InvalidRequestError naming the field, in the protocol's spelling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hippo.errors import IncompatiblePairError, InvalidRequestError
from hippo.rpc.convert_stream import checked_epoch
from hippo.types import (
    PROTOCOL_VERSION,
    ChatMessage,
    ContentPart,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    ModelInfo,
    OpenRequest,
    Pace,
    Pruning,
    PruningStrategy,
    SamplingParams,
    StepLimits,
    TextPart,
)
from hippo.v1 import common_pb2 as pb
from hippo.validation import MAX_TOP_LOGPROBS, validate_sampling

ROLES = ("system", "user", "assistant")
MAX_PRUNING_RATIO = 0.99

_MEDIA_KINDS = {
    MediaKind.VIDEO: pb.MEDIA_KIND_VIDEO,
    MediaKind.IMAGE: pb.MEDIA_KIND_IMAGE,
}
_MEDIA_KINDS_BACK = {number: kind for kind, number in _MEDIA_KINDS.items()}
_STRATEGIES = {
    strategy: pb.PruningStrategy.Value(f"PRUNING_STRATEGY_{strategy.name}")
    for strategy in PruningStrategy
}
_STRATEGIES_BACK = {number: strategy for strategy, number in _STRATEGIES.items()}


def open_to_proto(request: OpenRequest) -> pb.Open:
    """Raises InvalidRequestError for values that the wire cannot carry, such as negative counts."""
    try:
        return pb.Open(
            request_id=request.request_id,
            messages=[_message_to_proto(message) for message in request.messages],
            media=[
                pb.Media(kind=_MEDIA_KINDS[item.kind], data=item.data) for item in request.media
            ],
            sampling=_sampling_to_proto(request.sampling),
            frame_plan=pb.FramePlan(
                fps=request.frame_plan.fps,
                min_frames=request.frame_plan.min_frames,
                max_frames=request.frame_plan.max_frames,
                max_pixels=request.frame_plan.max_pixels,
            ),
            pruning=pb.Pruning(
                strategy=_STRATEGIES[request.pruning.strategy],
                ratio=request.pruning.ratio,
                seed=request.pruning.seed,
                min_visual_tokens=request.pruning.min_visual_tokens,
            ),
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=pace_to_proto(request.pace),
            protocol_version=PROTOCOL_VERSION,
            committed_ids=request.committed_ids,
            epoch=request.epoch,
            cache_salt=request.cache_salt,
            num_top_logprobs=request.num_top_logprobs,
            is_max_tokens_default=request.is_max_tokens_default,
        )
    except ValueError as error:
        raise InvalidRequestError(f"the request does not fit the protocol: {error}") from None


def open_from_proto(message: pb.Open, *, num_token_ids: int) -> OpenRequest:
    """Raises IncompatiblePairError for another protocol version, before anything else is read."""
    check_version(message.protocol_version, peer="the client")
    media = tuple(_media_from_proto(item, index) for index, item in enumerate(message.media))
    if not message.messages:
        raise InvalidRequestError("messages is empty; at least one is needed", param="messages")
    messages = tuple(
        _message_from_proto(item, index, len(media)) for index, item in enumerate(message.messages)
    )
    if message.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    if len(message.committed_ids) >= message.max_tokens:
        raise InvalidRequestError(
            f"committed_ids holds {len(message.committed_ids)} ids, but max_tokens is "
            f"{message.max_tokens}: nothing is left to do",
            param="committed_ids",
        )
    sampling = _sampling_from_proto(message.sampling)
    validate_sampling(sampling, num_token_ids=num_token_ids, max_tokens=message.max_tokens)
    return OpenRequest(
        request_id=message.request_id,
        messages=messages,
        media=media,
        sampling=sampling,
        frame_plan=_frame_plan_from_proto(message.frame_plan),
        pruning=_pruning_from_proto(message.pruning) if message.HasField("pruning") else Pruning(),
        max_tokens=message.max_tokens,
        end_token_ids=_token_ids(message.end_token_ids, num_token_ids, "end_token_ids"),
        pace=pace_from_proto(message.pace) if message.HasField("pace") else Pace(),
        committed_ids=_token_ids(message.committed_ids, num_token_ids, "committed_ids"),
        epoch=checked_epoch(message.epoch, "epoch"),
        cache_salt=message.cache_salt,
        num_top_logprobs=_num_top_logprobs(message),
        is_max_tokens_default=message.is_max_tokens_default,
    )


def _num_top_logprobs(message: pb.Open) -> int | None:
    if not message.HasField("num_top_logprobs"):
        return None
    if message.num_top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"num_top_logprobs is {message.num_top_logprobs}; at most {MAX_TOP_LOGPROBS} are given",
            param="num_top_logprobs",
        )
    return message.num_top_logprobs


def check_version(version: int, *, peer: str) -> None:
    """Raises IncompatiblePairError unless ``peer`` speaks this version."""
    if version != PROTOCOL_VERSION:
        raise IncompatiblePairError(
            f"{peer} speaks protocol version {version}, this side {PROTOCOL_VERSION}; install "
            "the same release on both",
            param="protocol_version",
        )


def pace_to_proto(pace: Pace) -> pb.Pace:
    return pb.Pace(
        optimistic=_limits_to_proto(pace.optimistic),
        conservative=_limits_to_proto(pace.conservative),
        max_ahead=pace.max_ahead,
        block_size=pace.block_size,
    )


def pace_from_proto(message: pb.Pace) -> Pace:
    if message.block_size < 1:
        raise InvalidRequestError(
            "block_size is 0; a block has at least 1 token", param="pace.block_size"
        )
    return Pace(
        optimistic=_limits_from_proto(message.optimistic, "pace.optimistic"),
        conservative=_limits_from_proto(message.conservative, "pace.conservative"),
        max_ahead=message.max_ahead,
        block_size=message.block_size,
    )


def model_to_proto(info: ModelInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        protocol_version=info.protocol_version,
        name=info.name,
        family=info.family,
        device=info.device,
        dtype=info.dtype,
        tokenizer_hash=info.tokenizer_hash,
        tokenizer_json=info.tokenizer_json,
        num_token_ids=info.num_token_ids,
        end_token_ids=info.end_token_ids,
        max_context_length=info.max_context_length,
        num_slots=info.num_slots,
        num_parameters=info.num_parameters,
        device_uuids=info.device_uuids,
    )


def model_from_proto(message: pb.GetModelResponse, *, peer: str) -> ModelInfo:
    """Raises IncompatiblePairError when ``peer`` speaks another protocol version."""
    check_version(message.protocol_version, peer=peer)
    return ModelInfo(
        name=message.name,
        family=message.family,
        device=message.device,
        dtype=message.dtype,
        tokenizer_hash=message.tokenizer_hash,
        tokenizer_json=message.tokenizer_json,
        num_token_ids=message.num_token_ids,
        end_token_ids=tuple(message.end_token_ids),
        max_context_length=message.max_context_length,
        num_slots=message.num_slots,
        num_parameters=message.num_parameters,
        protocol_version=message.protocol_version,
        device_uuids=tuple(message.device_uuids),
    )


def _token_ids(ids: Sequence[int], num_token_ids: int, field: str) -> tuple[int, ...]:
    found = tuple(ids)
    if found and max(found) >= num_token_ids:
        raise InvalidRequestError(
            f"{field} holds {max(found)}; the model's token ids are 0 to {num_token_ids - 1}",
            param=field,
        )
    return found


def _message_to_proto(message: ChatMessage) -> pb.ChatMessage:
    parts = [
        pb.ContentPart(text=part.text)
        if isinstance(part, TextPart)
        else pb.ContentPart(media_index=part.media_index)
        for part in message.content
    ]
    return pb.ChatMessage(role=message.role, content=parts)


def _message_from_proto(message: pb.ChatMessage, index: int, num_media: int) -> ChatMessage:
    field = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{field}.role is {message.role!r}; expected one of {', '.join(ROLES)}",
            param=f"{field}.role",
        )
    return ChatMessage(message.role, tuple(_parts(message.content, field, num_media)))


def _parts(content: Iterable[pb.ContentPart], field: str, num_media: int) -> Iterable[ContentPart]:
    for place, part in enumerate(content):
        name = f"{field}.content[{place}]"
        kind = part.WhichOneof("part")
        if kind == "text":
            yield TextPart(part.text)
        elif kind == "media_index":
            if part.media_index >= num_media:
                raise InvalidRequestError(
                    f"{name}.media_index is {part.media_index}, but the request has {num_media} "
                    "media items",
                    param=f"{name}.media_index",
                )
            yield MediaPart(part.media_index)
        else:
            raise InvalidRequestError(f"{name} is empty: set text or media_index", param=name)


def _media_from_proto(message: pb.Media, index: int) -> Media:
    kind = _MEDIA_KINDS_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequestError(
            f"media[{index}].kind is not set; expected video or image",
            param=f"media[{index}].kind",
        )
    return Media(kind, message.data)


def _sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[
            pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias
        ],
        seed=params.seed,
        choice_index=params.choice_index,
        min_tokens=params.min_tokens,
    )


def _sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        seed=message.seed,
        choice_index=message.choice_index,
        min_tokens=message.min_tokens,
    )


def _frame_plan_from_proto(message: pb.FramePlan) -> FramePlan:
    if not math.isfinite(message.fps) or message.fps < 0:
        raise InvalidRequestError(
            f"frame_plan.fps is {message.fps}; it must be 0 (the model's default) or more",
            param="frame_plan.fps",
        )
    if 0 < message.max_frames < message.min_frames:
        raise InvalidRequestError(
            f"frame_plan.min_frames is {message.min_frames}, more than max_frames "
            f"({message.max_frames})",
            param="frame_plan.min_frames",
        )
    return FramePlan(message.fps, message.min_frames, message.max_frames, message.max_pixels)


def _pruning_from_proto(message: pb.Pruning) -> Pruning:
    strategy = _STRATEGIES_BACK.get(message.strategy)
    if strategy is None:
        names = ", ".join(item.value for item in PruningStrategy)
        raise InvalidRequestError(
            f"pruning.strategy is not set or unknown; expected one of {names}",
            param="pruning.strategy",
        )
    ratio = round(message.ratio, 6)  # a float32: 0.99 arrives a little larger
    if not 0.0 <= ratio <= MAX_PRUNING_RATIO:
        raise InvalidRequestError(
            f"pruning.ratio is {ratio}; it must be 0 to {MAX_PRUNING_RATIO}",
            param="pruning.ratio",
        )
    return Pruning(strategy, ratio, message.seed, message.min_visual_tokens)


def _limits_to_proto(limits: StepLimits) -> pb.StepLimits:
    return pb.StepLimits(
        min_draft_tokens=limits.min_draft_tokens,
        max_draft_tokens=limits.max_draft_tokens,
        wait_ns=limits.wait_ns,
    )


def _limits_from_proto(message: pb.StepLimits, field: str) -> StepLimits:
    if message.min_draft_tokens > message.max_draft_tokens:
        raise InvalidRequestError(
            f"{field}.min_draft_tokens is {message.min_draft_tokens}, more than max_draft_tokens "
            f"({message.max_draft_tokens})",
            param=f"{field}.min_draft_tokens",
        )
    return StepLimits(message.min_draft_tokens, message.max_draft_tokens, message.wait_ns)
