"""Converts values of hippo.types to protocol messages and back, field by field, by name.

A value corresponds to the message of the same name, with the exceptions below, and each of its
fields to the message's field of the same name. Enumeration members are matched by name
(``FinishReason.STOP`` is ``FINISH_REASON_STOP``, None is the unspecified member), tuples of two are
messages of two fields, and a field that is not set gives the value's default.
"""

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from hippo import types
from hippo.v1 import common_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)

_MESSAGES: Mapping[type, type[Message]] = {
    **{
        value: getattr(pb, name)
        for name, value in vars(types).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and hasattr(pb, name)
    },
    types.TextPart: pb.ContentPart,
    types.MediaPart: pb.ContentPart,
    types.OpenRequest: pb.Open,
    types.PromptInfo: pb.Prompt,
    types.ModelInfo: pb.GetModelResponse,
}
_VALUES = {message: value for value, message in _MESSAGES.items() if message is not pb.ContentPart}

_Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """How one field is converted; ``encode`` and ``decode`` are None if it is not."""

    name: str
    encode: _Convert | None
    decode: _Convert | None
    has_presence: bool = False
    absent: Any = None  # the value if it is not set; None: the dataclass's default


def encode(value: Any) -> Any:
    """Returns the message of a value; raises ValueError if the message cannot represent it."""
    message = _MESSAGES[type(value)]
    fields = {}
    for field in _FIELDS[type(value)]:
        item = getattr(value, field.name)
        fields[field.name] = item if field.encode is None else field.encode(item)
    return message(**fields)


def decode(message: Message) -> Any:
    """Returns the value of a message, without validation."""
    if isinstance(message, pb.ContentPart):
        is_text = message.WhichOneof("part") == "text"
        return types.TextPart(message.text) if is_text else types.MediaPart(message.media_index)
    value = _VALUES[type(message)]
    fields = {}
    for field in _FIELDS[value]:
        if field.has_presence and not message.HasField(field.name):
            if field.absent is not None:
                fields[field.name] = field.absent
            continue
        item = getattr(message, field.name)
        fields[field.name] = item if field.decode is None else field.decode(item)
    return value(**fields)


def wrap(envelope: type[MessageT], value: Any) -> MessageT:
    """Returns a message of type ``envelope`` with the value in its oneof ``message``."""
    message = encode(value)
    places = envelope.DESCRIPTOR.oneofs_by_name["message"].fields
    place = next(each.name for each in places if each.message_type is message.DESCRIPTOR)
    return envelope(**{place: message})


def unwrap(envelope: Message) -> Any:
    """Returns the value in a stream message, which must not be empty."""
    kind = envelope.WhichOneof("message")
    assert kind is not None, "an empty message"
    return decode(getattr(envelope, kind))


def _field(field: Any, hint: Any) -> _Field:
    if field.enum_type is not None:
        to_number = _numbers(field.enum_type, hint)
        from_number = {number: member for member, number in to_number.items()}
        return _Field(field.name, to_number.__getitem__, from_number.get)
    if not field.is_repeated:
        if field.message_type is None:
            return _Field(field.name, None, None, field.has_presence)
        return _Field(field.name, encode, decode, has_presence=True, absent=hint())
    if field.message_type is None:
        return _Field(field.name, None, tuple)
    if typing.get_origin(typing.get_args(hint)[0]) is not tuple:
        return _Field(
            field.name, lambda items: [*map(encode, items)], lambda items: (*map(decode, items),)
        )
    first, second = (each.name for each in field.message_type.fields)
    return _Field(
        field.name,
        lambda pairs: [{first: one, second: other} for one, other in pairs],
        lambda pairs: tuple((getattr(pair, first), getattr(pair, second)) for pair in pairs),
    )


def _numbers(described: Any, hint: Any) -> dict[enum.Enum | None, int]:
    """Returns the protocol's numbers of an enumeration's members and of None."""
    unspecified = described.values_by_number[0]
    prefix = unspecified.name.removesuffix("UNSPECIFIED")
    numbers: dict[enum.Enum | None, int] = {None: unspecified.number}
    kinds = (hint, *typing.get_args(hint))
    members: Any = next(kind for kind in kinds if isinstance(kind, enum.EnumType))
    for member in members:
        numbers[member] = described.values_by_name[prefix + member.name].number
    return numbers


_FIELDS = {
    value: tuple(
        _field(message.DESCRIPTOR.fields_by_name[name], hint)
        for name, hint in typing.get_type_hints(value, vars(types)).items()
    )
    for value, message in _MESSAGES.items()
}
