"""Every value survives the wire, and what is malformed is refused with the field's name."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hippo import types
from hippo.errors import IncompatiblePairError, InvalidRequestError
from hippo.rpc import codec, convert
from hippo.types import (
    Block,
    ChatMessage,
    Commit,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    ModelInfo,
    OpenRequest,
    Pace,
    PromptInfo,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    StepLimits,
    TextPart,
    Timing,
    Verdict,
)
from hippo.v1 import common_pb2 as pb
from hippo.v1 import draft_pb2, target_pb2

REQUEST = OpenRequest(
    request_id="r1",
    messages=(
        ChatMessage("system", (TextPart("Be brief."),)),
        ChatMessage("user", (MediaPart(1), TextPart("And this?"), MediaPart(0))),
    ),
    media=(Media(MediaKind.IMAGE, b"\xff\xd8"), Media(MediaKind.VIDEO, b"\x00mp4")),
    sampling=SamplingParams(temperature=0.75, seed=2**64 - 1, min_tokens=30),
    frame_plan=FramePlan(fps=1.5, min_frames=4, max_frames=64, max_pixels=100_000),
    pruning=Pruning(PruningStrategy.RANDOM, 0.9, seed=2**63, spread=0.0, score_layer_share=0.5),
    max_tokens=100,
    end_token_ids=(7, 9),
    pace=Pace(StepLimits(1, 8, 10**12), StepLimits(0, 1, 5), max_ahead=16, block_size=3),
    committed_ids=(5, 6),
    num_top_logprobs=5,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type in hippo.types."""
    arguments = typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = typing.get_type_hints(hint, vars(types))
        return st.builds(hint, **{name: values(each) for name, each in fields.items()})
    if typing.get_origin(hint) is not tuple and arguments:
        return st.one_of(*map(values, arguments))
    if arguments[1:] == (...,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if arguments:
        return st.tuples(*map(values, arguments))
    narrow = {int: st.integers(0, 2**31 - 1), float: st.floats(width=32, allow_nan=False)}
    return narrow[hint] if hint in narrow else st.from_type(hint)


ON_STREAMS = (Timing, Block, Commit, PromptInfo, Pace, Selection, Verdict)


@pytest.mark.parametrize("kind", [OpenRequest, ModelInfo, *ON_STREAMS])
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_value_survives_the_wire(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    message = codec.encode(value)
    assert codec.decode(type(message).FromString(message.SerializeToString())) == value


def test_a_model_may_have_more_parameters_than_32_bits_count() -> None:
    info = ModelInfo("m", "toy", "cpu", "float32", b"h", b"{}", 50, (1, 2), 512, 4, 10**10)
    message = pb.GetModelResponse.FromString(codec.encode(info).SerializeToString())
    assert convert.model_from_proto(message, peer="the service") == info


def test_an_open_request_survives_the_wire_and_its_checks() -> None:
    message = pb.Open.FromString(convert.open_to_proto(REQUEST).SerializeToString())
    assert convert.open_from_proto(message, num_token_ids=50) == REQUEST


def test_what_a_bare_open_leaves_out_gets_the_defaults() -> None:
    message = pb.Open(
        messages=[pb.ChatMessage(role="user", content=[pb.ContentPart(text="hello")])],
        max_tokens=1,
        protocol_version=1,
    )

    request = convert.open_from_proto(message, num_token_ids=50)

    assert request.sampling == SamplingParams()
    assert request.pace == Pace()
    assert request.pruning == Pruning()
    assert request.frame_plan == FramePlan()
    assert request.num_top_logprobs is None


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("messages", lambda m: m.ClearField("messages")),
        ("messages[0].role", lambda m: setattr(m.messages[0], "role", "robot")),
        ("messages[1].content[0]", lambda m: m.messages[1].content[0].Clear()),
        (
            "messages[1].content[0].media_index",
            lambda m: setattr(m.messages[1].content[0], "media_index", 2),
        ),
        ("media[0].kind", lambda m: m.media[0].ClearField("kind")),
        ("max_tokens", lambda m: m.ClearField("max_tokens")),
        ("template_values", lambda m: setattr(m, "template_values", "[1]")),
        ("template_values", lambda m: setattr(m, "template_values", "{")),
        ("committed_ids", lambda m: m.committed_ids.extend(range(49))),
        ("committed_ids", lambda m: m.committed_ids.extend([50])),
        ("end_token_ids", lambda m: m.end_token_ids.extend([50])),
        ("temperature", lambda m: setattr(m.sampling, "temperature", -1)),
        ("num_top_logprobs", lambda m: setattr(m, "num_top_logprobs", 21)),
        ("min_tokens", lambda m: setattr(m.sampling, "min_tokens", 51)),
        ("logit_bias", lambda m: m.sampling.logit_bias.add(token_id=50)),
        ("frame_plan.fps", lambda m: setattr(m.frame_plan, "fps", float("inf"))),
        ("frame_plan.min_frames", lambda m: setattr(m.frame_plan, "min_frames", 65)),
        ("frame_plan.num_frames", lambda m: setattr(m.frame_plan, "num_frames", 8)),
        ("frame_plan.min_pixels", lambda m: setattr(m.frame_plan, "min_pixels", 100_001)),
        ("media[0].path", lambda m: setattr(m.media[0], "path", "/media/clip.mp4")),
        ("pruning.strategy", lambda m: m.pruning.ClearField("strategy")),
        ("pruning.strategy", lambda m: setattr(m.pruning, "strategy", 77)),
        ("pruning.ratio", lambda m: setattr(m.pruning, "ratio", 0.995)),
        ("pruning.ratio", lambda m: setattr(m.pruning, "ratio", float("nan"))),
        ("pruning.spread", lambda m: setattr(m.pruning, "spread", 1.5)),
        ("pruning.score_layer_share", lambda m: setattr(m.pruning, "score_layer_share", 0.0)),
        ("pace.block_size", lambda m: m.pace.ClearField("block_size")),
        (
            "pace.optimistic.min_draft_tokens",
            lambda m: setattr(m.pace.optimistic, "min_draft_tokens", 9),
        ),
    ],
)
def test_a_malformed_open_is_refused_by_its_field(
    field: str, change: Callable[[Any], None]
) -> None:
    message = convert.open_to_proto(dataclasses.replace(REQUEST, max_tokens=50))
    change(message)

    with pytest.raises(InvalidRequestError) as caught:
        convert.open_from_proto(message, num_token_ids=50)

    assert caught.value.param == field
    assert field.rpartition(".")[2].split("[")[0] in caught.value.message


def test_a_value_that_the_wire_cannot_carry_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError):
        convert.open_to_proto(dataclasses.replace(REQUEST, max_tokens=-1))


@pytest.mark.parametrize(
    "message",
    [
        target_pb2.VerifyRequest(
            verify=pb.Block(token_ids=[5], branches=[pb.Branch(token_ids=[5, 50])])
        ),
        draft_pb2.DraftRequest(select=pb.Selection(kept_indices=[1, 1], num_visual_tokens=4)),
        draft_pb2.DraftRequest(select=pb.Selection(kept_indices=[4], num_visual_tokens=4)),
    ],
)
def test_malformed_stream_values_are_refused(message: Message) -> None:
    with pytest.raises(InvalidRequestError):
        convert.from_stream(message, num_token_ids=50)


def test_an_exhausted_block_may_be_empty() -> None:
    message = target_pb2.VerifyRequest(verify=pb.Block(is_exhausted=True))

    assert convert.from_stream(message, num_token_ids=50) == Block(0, 0, (), is_exhausted=True)


def test_another_version_is_refused() -> None:
    message = pb.GetModelResponse(protocol_version=9)
    with pytest.raises(IncompatiblePairError, match="the service speaks protocol version 9"):
        convert.model_from_proto(message, peer="the service")
