"""Validated conversion of received messages: openings, messages of a sequence, models.

An InvalidRequestError names the field in the protocol's spelling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from hippo.base.validation import MAX_TOP_LOGPROBS, validate_sampling
from hippo.errors import IncompatiblePairError, InvalidRequestError
from hippo.rpc import codec
from hippo.types import (
    PROTOCOL_VERSION,
    Block,
    Commit,
    FramePlan,
    ModelInfo,
    OpenRequest,
    Pace,
    Pruning,
    PruningStrategy,
    Selection,
)
from hippo.v1 import common_pb2 as pb

ROLES = ("system", "user", "assistant")
MAX_PRUNING_RATIO = 0.99
# Each rejection increments the epoch, which must fit into its field for any sequence.
MAX_EPOCH = 2**31


def open_to_proto(request: OpenRequest) -> pb.Open:
    """Returns the message; raises InvalidRequestError for values that do not fit the fields."""
    try:
        message: pb.Open = codec.encode(request)
    except ValueError as error:
        raise InvalidRequestError(f"the request does not fit the protocol: {error}") from None
    message.protocol_version = PROTOCOL_VERSION
    return message


def open_from_proto(message: pb.Open, *, num_token_ids: int) -> OpenRequest:
    """Returns the request; raises IncompatiblePairError first, for another protocol version."""
    check_version(message.protocol_version, peer="the client")
    _check_content(message)
    if message.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    if len(message.committed_ids) >= message.max_tokens:
        raise InvalidRequestError(
            f"committed_ids holds {len(message.committed_ids)} ids, but max_tokens is "
            f"{message.max_tokens}: nothing is left to do",
            param="committed_ids",
        )
    if message.num_top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"num_top_logprobs is {message.num_top_logprobs}; at most {MAX_TOP_LOGPROBS} are given",
            param="num_top_logprobs",
        )
    request: OpenRequest = codec.decode(message)
    validate_sampling(request.sampling, num_token_ids=num_token_ids, max_tokens=request.max_tokens)
    _check_frame_plan(request.frame_plan)
    _check_ids(request.end_token_ids, num_token_ids, "end_token_ids")
    _check_ids(request.committed_ids, num_token_ids, "committed_ids")
    _check_epoch(request.epoch, "epoch")
    if message.HasField("pace"):
        _check_pace(request.pace)
    return replace(request, pruning=_checked_pruning(request.pruning))


def from_stream(envelope: Message, *, num_token_ids: int) -> Block | Commit | Pace | Selection:
    """Returns the value in a client's message after ``open``."""
    kind = envelope.WhichOneof("message")
    if kind is None:
        fields = envelope.DESCRIPTOR.oneofs_by_name["message"].fields
        names = " or ".join(field.name for field in fields if field.name != "open")
        raise InvalidRequestError(f"an empty message; expected {names}")
    if kind == "open":
        raise InvalidRequestError("open came twice; one stream is one sequence", param="open")
    value: Any = codec.unwrap(envelope)
    if isinstance(value, Block):
        _check_block(value, num_token_ids)
    elif isinstance(value, Commit):
        if not value.token_ids:
            raise InvalidRequestError("a commit has no token ids", param="commit.token_ids")
        _check_ids(value.token_ids, num_token_ids, "token_ids")
        _check_epoch(value.epoch, "commit.epoch")
    elif isinstance(value, Pace):
        _check_pace(value)
    else:
        _check_selection(value)
    return value  # type: ignore[no-any-return]


def model_from_proto(message: pb.GetModelResponse, *, peer: str) -> ModelInfo:
    """Returns the model's description; raises IncompatiblePairError for another version."""
    check_version(message.protocol_version, peer=peer)
    info: ModelInfo = codec.decode(message)
    return info


def check_version(version: int, *, peer: str) -> None:
    """Raises IncompatiblePairError unless ``peer`` has this protocol version."""
    if version != PROTOCOL_VERSION:
        raise IncompatiblePairError(
            f"{peer} speaks protocol version {version}, this side {PROTOCOL_VERSION}; install "
            "the same release on both",
            param="protocol_version",
        )


def _check_content(message: pb.Open) -> None:
    for index, item in enumerate(message.media):
        if item.kind not in (pb.MEDIA_KIND_VIDEO, pb.MEDIA_KIND_IMAGE):
            raise InvalidRequestError(
                f"media[{index}].kind is not set; expected video or image",
                param=f"media[{index}].kind",
            )
        if item.path and item.data:
            raise InvalidRequestError(
                f"media[{index}] has both data and path; an item has one of them",
                param=f"media[{index}].path",
            )
    if not message.messages:
        raise InvalidRequestError("messages is empty; at least one is needed", param="messages")
    for index, turn in enumerate(message.messages):
        field = f"messages[{index}]"
        if turn.role not in ROLES:
            raise InvalidRequestError(
                f"{field}.role is {turn.role!r}; expected one of {', '.join(ROLES)}",
                param=f"{field}.role",
            )
        for place, part in enumerate(turn.content):
            _check_part(part, f"{field}.content[{place}]", len(message.media))


def _check_part(part: pb.ContentPart, name: str, num_media: int) -> None:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidRequestError(f"{name} is empty: set text or media_index", param=name)
    if kind == "media_index" and part.media_index >= num_media:
        raise InvalidRequestError(
            f"{name}.media_index is {part.media_index}, but the request has {num_media} "
            "media items",
            param=f"{name}.media_index",
        )


def _check_frame_plan(plan: FramePlan) -> None:
    if not math.isfinite(plan.fps) or plan.fps < 0:
        raise InvalidRequestError(
            f"frame_plan.fps is {plan.fps}; it must be 0 (the model's default) or more",
            param="frame_plan.fps",
        )
    if 0 < plan.max_frames < plan.min_frames:
        raise InvalidRequestError(
            f"frame_plan.min_frames is {plan.min_frames}, more than max_frames ({plan.max_frames})",
            param="frame_plan.min_frames",
        )
    if plan.num_frames and (plan.fps or plan.min_frames or plan.max_frames):
        raise InvalidRequestError(
            "frame_plan.num_frames is set beside fps, min_frames or max_frames, which it excludes",
            param="frame_plan.num_frames",
        )
    if 0 < plan.max_pixels < plan.min_pixels:
        raise InvalidRequestError(
            f"frame_plan.min_pixels is {plan.min_pixels}, more than max_pixels ({plan.max_pixels})",
            param="frame_plan.min_pixels",
        )
    if plan.background > 1 << 24:
        raise InvalidRequestError(
            f"frame_plan.background is {plan.background}; it must be at most {1 << 24}, white",
            param="frame_plan.background",
        )


def _checked_pruning(pruning: Pruning) -> Pruning:
    strategy: PruningStrategy | None = pruning.strategy
    if strategy is None:  # not set, or an unknown number
        names = ", ".join(item.value for item in PruningStrategy)
        raise InvalidRequestError(
            f"pruning.strategy is not set or unknown; expected one of {names}",
            param="pruning.strategy",
        )
    ratio = round(pruning.ratio, 6)  # a float32: 0.99 arrives a little larger
    if not 0.0 <= ratio <= MAX_PRUNING_RATIO:
        raise InvalidRequestError(
            f"pruning.ratio is {ratio}; it must be 0 to {MAX_PRUNING_RATIO}",
            param="pruning.ratio",
        )
    for name, least in (("spread", 0.0), ("score_layer_share", 1e-6)):
        share = getattr(pruning, name)
        if share is not None and not least <= share <= 1.0:
            bounds = "0 to 1" if least == 0.0 else "above 0 and at most 1"
            raise InvalidRequestError(
                f"pruning.{name} is {share}; it must be {bounds}", param=f"pruning.{name}"
            )
    return replace(pruning, ratio=ratio)


def _check_pace(pace: Pace) -> None:
    if pace.block_size < 1:
        raise InvalidRequestError(
            "block_size is 0; a block has at least 1 token", param="pace.block_size"
        )
    for field, limits in (
        ("pace.optimistic", pace.optimistic),
        ("pace.conservative", pace.conservative),
    ):
        if limits.min_draft_tokens > limits.max_draft_tokens:
            raise InvalidRequestError(
                f"{field}.min_draft_tokens is {limits.min_draft_tokens}, more than "
                f"max_draft_tokens ({limits.max_draft_tokens})",
                param=f"{field}.min_draft_tokens",
            )


def _check_block(block: Block, num_token_ids: int) -> None:
    if not block.token_ids and not block.is_exhausted:
        raise InvalidRequestError(
            "a block has no token ids; only one with is_exhausted may be empty",
            param="verify.token_ids",
        )
    for ids in (block.token_ids, *(branch.token_ids for branch in block.branches)):
        _check_ids(ids, num_token_ids, "token_ids")
    _check_epoch(block.epoch, "verify.epoch")


def _check_selection(selection: Selection) -> None:
    previous = -1
    for index in selection.kept_indices:
        if index <= previous:
            raise InvalidRequestError(
                f"kept_indices must ascend, but {index} follows {previous}",
                param="select.kept_indices",
            )
        previous = index
    if previous >= selection.num_visual_tokens:
        raise InvalidRequestError(
            f"kept_indices holds {previous}, but there are {selection.num_visual_tokens} visual "
            "tokens",
            param="select.kept_indices",
        )


def _check_epoch(epoch: int, field: str) -> None:
    """Refuses an epoch that no sequence can reach."""
    if epoch > MAX_EPOCH:
        raise InvalidRequestError(f"{field} is {epoch}; it is at most {MAX_EPOCH}", param=field)


def _check_ids(token_ids: Sequence[int], num_token_ids: int, field: str) -> None:
    if token_ids and max(token_ids) >= num_token_ids:
        raise InvalidRequestError(
            f"{field} holds {max(token_ids)}; the model's token ids are 0 to {num_token_ids - 1}",
            param=field,
        )
