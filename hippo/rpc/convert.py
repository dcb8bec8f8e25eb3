"""Validated conversion of received messages: openings, messages of a sequence, models.

An InvalidRequestError names the field in the protocol's spelling.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

from google.protobuf.message import Message

from hippo.base.validation import MAX_TOP_LOGPROBS, validate_sampling
from hippo.errors import IncompatiblePairError, InvalidRequestError
from hippo.rpc import codec
from hippo.types import (
    PROTOCOL_VERSION,
    Block,
    Commit,
    FramePlan,
    Hold,
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
    _check_template_values(message.template_values)
    if message.max_tokens < 1:
        _refuse("max_tokens", "must be at least 1")
    if len(message.committed_ids) >= message.max_tokens:
        num_ids = len(message.committed_ids)
        problem = f"holds {num_ids} ids, but max_tokens is {message.max_tokens}: nothing is left"
        _refuse("committed_ids", problem)
    if message.num_top_logprobs > MAX_TOP_LOGPROBS:
        problem = f"is {message.num_top_logprobs}; it is at most {MAX_TOP_LOGPROBS}"
        _refuse("num_top_logprobs", problem)
    request: OpenRequest = codec.decode(message)
    validate_sampling(request.sampling, num_token_ids=num_token_ids, max_tokens=request.max_tokens)
    _check_frame_plan(request.frame_plan)
    _check_ids(request.end_token_ids, num_token_ids, "end_token_ids")
    _check_ids(request.committed_ids, num_token_ids, "committed_ids")
    _check_epoch(request.epoch, "epoch")
    if message.HasField("pace"):
        _check_pace(request.pace)
    return replace(request, pruning=_checked_pruning(request.pruning))


def from_stream(
    envelope: Message, *, num_token_ids: int
) -> Block | Commit | Hold | Pace | Selection:
    """Returns the value in a client's message after ``open``."""
    kind = envelope.WhichOneof("message")
    if kind is None:
        fields = envelope.DESCRIPTOR.oneofs_by_name["message"].fields
        names = " or ".join(field.name for field in fields if field.name != "open")
        raise InvalidRequestError(f"an empty message; expected {names}")
    if kind == "open":
        _refuse("open", "came twice; one stream is one sequence")
    value: Any = codec.unwrap(envelope)
    if isinstance(value, Block):
        if not value.token_ids and not value.is_exhausted:
            _refuse("verify.token_ids", "is empty; only a block with is_exhausted has no token ids")
        for ids in (value.token_ids, *(branch.token_ids for branch in value.branches)):
            _check_ids(ids, num_token_ids, "verify.token_ids")
        _check_epoch(value.epoch, "verify.epoch")
    elif isinstance(value, Commit):
        if not value.token_ids:
            _refuse("commit.token_ids", "is empty; a commit settles at least one token")
        _check_ids(value.token_ids, num_token_ids, "commit.token_ids")
        _check_epoch(value.epoch, "commit.epoch")
    elif isinstance(value, Pace):
        _check_pace(value)
    elif isinstance(value, Selection):
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
            _refuse(f"media[{index}].kind", "is not set; expected video or image")
        if item.path and item.data:
            _refuse(f"media[{index}].path", "is set beside data; an item has only one of both")
    num_media = len(message.media)
    if not message.messages:
        _refuse("messages", "is empty; at least one is needed")
    for index, turn in enumerate(message.messages):
        field = f"messages[{index}]"
        if turn.role not in ROLES:
            _refuse(f"{field}.role", f"is {turn.role!r}; expected one of {', '.join(ROLES)}")
        for place, part in enumerate(turn.content):
            name, kind = f"{field}.content[{place}]", part.WhichOneof("part")
            if kind is None:
                _refuse(name, "is empty: set text or media_index")
            if kind == "media_index" and part.media_index >= num_media:
                problem = f"is {part.media_index}, but the request has {num_media} media items"
                _refuse(f"{name}.media_index", problem)


def _check_template_values(values: str) -> None:
    try:
        is_object = isinstance(json.loads(values or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        _refuse("template_values", "is no JSON object")


def _check_frame_plan(plan: FramePlan) -> None:
    if not math.isfinite(plan.fps) or plan.fps < 0:
        _refuse("frame_plan.fps", f"is {plan.fps}; it must be 0 (the model's default) or more")
    if plan.num_frames and (plan.fps or plan.min_frames or plan.max_frames):
        problem = "is set beside fps, min_frames or max_frames, which it excludes"
        _refuse("frame_plan.num_frames", problem)
    for what in ("frames", "pixels"):
        least, most = (getattr(plan, f"{bound}_{what}") for bound in ("min", "max"))
        if 0 < most < least:
            _refuse(f"frame_plan.min_{what}", f"is {least}, more than max_{what} ({most})")
    if plan.background > 1 << 24:
        problem = f"is {plan.background}; it must be at most {1 << 24}, white"
        _refuse("frame_plan.background", problem)


def _checked_pruning(pruning: Pruning) -> Pruning:
    strategy: PruningStrategy | None = pruning.strategy
    if strategy is None:  # not set, or an unknown number
        names = ", ".join(item.value for item in PruningStrategy)
        _refuse("pruning.strategy", f"is not set or unknown; expected one of {names}")
    ratio = round(pruning.ratio, 6)  # a float32: 0.99 arrives a little larger
    if not 0.0 <= ratio <= MAX_PRUNING_RATIO:
        _refuse("pruning.ratio", f"is {ratio}; it must be 0 to {MAX_PRUNING_RATIO}")
    for name, least in (("spread", 0.0), ("score_layer_share", 1e-6)):
        share = getattr(pruning, name)
        if share is not None and not least <= share <= 1.0:
            bounds = "0 to 1" if least == 0.0 else "above 0 and at most 1"
            _refuse(f"pruning.{name}", f"is {share}; it must be {bounds}")
    return replace(pruning, ratio=ratio)


def _check_pace(pace: Pace) -> None:
    if pace.block_size < 1:
        _refuse("pace.block_size", "is 0; a block has at least 1 token")
    for name, limits in (("optimistic", pace.optimistic), ("conservative", pace.conservative)):
        least, most = limits.min_draft_tokens, limits.max_draft_tokens
        if least > most:
            problem = f"is {least}, more than max_draft_tokens ({most})"
            _refuse(f"pace.{name}.min_draft_tokens", problem)


def _check_selection(selection: Selection) -> None:
    kept, num_tokens = selection.kept_indices, selection.num_visual_tokens
    for previous, index in pairwise(kept):
        if index <= previous:
            _refuse("select.kept_indices", f"must ascend, but {index} follows {previous}")
    if kept and kept[-1] >= num_tokens:
        problem = f"holds {kept[-1]}, but there are {num_tokens} visual tokens"
        _refuse("select.kept_indices", problem)


def _check_epoch(epoch: int, field: str) -> None:
    """Refuses an epoch that no sequence can reach."""
    if epoch > MAX_EPOCH:
        _refuse(field, f"is {epoch}; it is at most {MAX_EPOCH}")


def _check_ids(token_ids: Sequence[int], num_token_ids: int, field: str) -> None:
    if token_ids and max(token_ids) >= num_token_ids:
        most = num_token_ids - 1
        _refuse(field, f"holds {max(token_ids)}; the model's token ids are 0 to {most}")


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{field} {problem}", param=field)
