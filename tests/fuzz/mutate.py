"""Mutations of bytes; all randomness comes from the generator that is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63)


def generator(seed: int, number: int) -> random.Random:
    """The generator of input ``number``: inputs can be made again one by one."""
    return random.Random(f"{seed}:{number}")


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """``data`` after one to eight changes; ``others`` lend it pieces."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        if not changed:
            break
        rng.choice(_CHANGES)(rng, changed, others)
    return bytes(changed)


def _span(rng: random.Random, data: bytearray) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + (1 << rng.randrange(10)))


def _flip_bits(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _put_word(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    size = rng.choice((1, 2, 4, 8))
    word = rng.choice(_WORDS) if rng.random() < 0.7 else rng.getrandbits(64)
    start = rng.randrange(len(data))
    # In the head more often than not: there are the sizes and counts.
    if rng.random() < 0.5:
        start = rng.randrange(min(len(data), 512))
    order = rng.choice(("big", "little"))
    piece = (word % (1 << 8 * size)).to_bytes(size, "big" if order == "big" else "little")
    data[start : start + size] = piece[: len(data) - start]


def _delete(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, data)
    del data[start:end]


def _repeat(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, data)
    data[start:start] = data[start:end]


def _blank(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, data)
    data[start:end] = bytes([rng.choice((0, 0xFF, 0x20))]) * (end - start)


def _noise(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, data)
    data[start:end] = rng.randbytes(end - start)


def _cut(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data)) :]


def _move(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, data)
    piece = data[start:end]
    del data[start:end]
    place = rng.randrange(len(data) + 1)
    data[place:place] = piece


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    if other:
        start = rng.randrange(len(other))
        piece = other[start : start + (1 << rng.randrange(12))]
        place = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            data[place:place] = piece
        else:
            data[place : place + len(piece)] = piece


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip_bits,
    _flip_bits,
    _put_word,
    _put_word,
    _put_word,
    _delete,
    _repeat,
    _blank,
    _noise,
    _cut,
    _move,
    _splice,
)
