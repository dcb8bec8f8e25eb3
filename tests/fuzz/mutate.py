"""Mutations of bytes and of protocol messages; all randomness comes from the given generator."""

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63)

_KINDS = (
    *("bits", "bits", "word", "word", "word", "delete", "repeat", "blank", "noise", "cut", "move"),
    "splice",
)


def generator(seed: int, number: int) -> random.Random:
    """The generator of input ``number``: inputs can be made again one by one."""
    return random.Random(f"{seed}:{number}")


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """``data`` after one to eight changes; ``others`` lend it pieces."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        if not changed:
            break
        _change(rng, changed, others)
    return bytes(changed)


def _change(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """One change: of bits, of a number, of a piece, or of the length."""
    start = rng.randrange(len(data))
    end = min(len(data), start + (1 << rng.randrange(10)))
    kind = rng.choice(_KINDS)
    if kind == "bits":
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "word":
        size = rng.choice((1, 2, 4, 8))
        word = rng.choice(_WORDS) if rng.random() < 0.7 else rng.getrandbits(64)
        # In the head more often than not: there are the sizes and counts.
        start = rng.randrange(min(len(data), 512)) if rng.random() < 0.5 else start
        piece = (word % (1 << 8 * size)).to_bytes(size, "big" if rng.random() < 0.5 else "little")
        data[start : start + size] = piece[: len(data) - start]
    elif kind == "delete":
        del data[start:end]
    elif kind == "repeat":
        data[start:start] = data[start:end]
    elif kind == "blank":
        data[start:end] = bytes([rng.choice((0, 0xFF, 0x20))]) * (end - start)
    elif kind == "noise":
        data[start:end] = rng.randbytes(end - start)
    elif kind == "cut":
        del data[start:]
    elif kind == "move":
        piece = bytes(data[start:end])
        del data[start:end]
        place = rng.randrange(len(data) + 1)
        data[place:place] = piece
    elif other := rng.choice(others):
        place = rng.randrange(len(other))
        piece = other[place : place + (1 << rng.randrange(12))]
        data[start : start + (0 if rng.random() < 0.5 else len(piece))] = piece


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
        if inner is None or not inner.DESCRIPTOR.fields or rng.random() < 0.1:
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
