"""Mutations of bytes; all randomness comes from the generator that is given."""

from __future__ import annotations

import random
from collections.abc import Sequence

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
