"""Random and mutated protocol messages, made from their descriptors."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_COUNTS = (0, 1, 2, 3, 5, 15, 16, 63, 64, 100, 511, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_LONG_COUNTS = (*_COUNTS, 10**6, 10**9, 2**63, 2**64 - 1)
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 0.99, 1.5, 100.0, 1e38, 1e-40, float("inf"), float("nan"))
_STRINGS = ("", "user", "system", "assistant", "robot", "x" * 300, "\0", "\U0001f9db é", "test")
_BYTES = (b"", b"toy:4", b"toy:2", b"toy:60", b"toy:-1", b"toy:", b"toy", b"\0" * 100)
_MAX_DEPTH = 4


def random_message(rng: random.Random, message: Message, depth: int = 0) -> None:
    """Sets random fields of an empty message to odd values."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in fields:
        if rng.random() < 0.5 and depth < _MAX_DEPTH:
            put_random(rng, message, field, depth)


def put_random(
    rng: random.Random, message: Message, field: FieldDescriptor, depth: int = 0
) -> None:
    """Gives one field an odd value."""
    if field.is_repeated:
        values = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(rng.choice((1, 1, 2, 5))):
                random_message(rng, values.add(), depth + 1)
        else:
            size = rng.choice((1, 1, 2, 5, 20, 20, 600, 20_000 if rng.random() < 0.1 else 3))
            if rng.random() < 0.5:
                del values[:]
            values.extend(_value(rng, field) for _ in range(size))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        inner.SetInParent()
        random_message(rng, inner, depth + 1)
    else:
        setattr(message, field.name, _value(rng, field))


def mutate_message(rng: random.Random, message: Message) -> None:
    """Changes or clears one field somewhere in the message."""
    while True:
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        chosen = [f for f in fields if not f.containing_oneof or message.HasField(f.name)]
        field = rng.choice(chosen or fields)
        inner = _inner(rng, message, field)
        if inner is None or rng.random() < 0.1:
            break
        message = inner
    if rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        put_random(rng, message, field, 1)


def _inner(rng: random.Random, message: Message, field: FieldDescriptor) -> Message | None:
    """The message that the field holds, if it does."""
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        return None
    if field.is_repeated:
        values = getattr(message, field.name)
        return rng.choice(values) if len(values) else None
    return getattr(message, field.name) if message.HasField(field.name) else None


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_UINT32:
        return rng.choice(_COUNTS) if rng.random() < 0.5 else rng.randrange(70)
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return rng.choice(_LONG_COUNTS)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_NUMBERS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((-1, 0, 1, 2, 3, 5, 8, 9, 100, 2**31 - 1, -(2**31)))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(_BYTES)
    return rng.choice(_STRINGS)
