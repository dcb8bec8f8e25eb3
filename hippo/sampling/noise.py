"""Gumbel noise from an integer hash, equal on every device and in every batch shape.

The hash works on 32-bit words held in int64 tensors. Multipliers are signed 32-bit numbers, so
that their product with an unsigned word fits into int64, and a mask extracts the low 32 bits.
(Word mixing: C. Wellons, "hash prospector", lowbias32; key mixing: splitmix64.)
"""

from collections.abc import Sequence

import torch

from hippo.models.interface.transfer import to_device

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN64 = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
_NUM_BITS = 52  # n + 0.5 is then an exact float64, and (n + 0.5) / 2**52 is never 0 or 1


def noise_key(seed: int, choice_index: int) -> int:
    """Returns the 64-bit key of one choice of a request."""
    return _mix64(_mix64(seed & _MASK64) ^ _mix64((choice_index + 1) * _GOLDEN64))


def row_words(key: int, index: int) -> tuple[int, int, int]:
    """Returns three 32-bit words that determine the noise of completion index ``index``."""
    first = _mix64(key + (2 * index + 1) * _GOLDEN64)
    second = _mix64(key + (2 * index + 2) * _GOLDEN64)
    return first & _MASK32, first >> 32, second >> 32


def hash_bits(words: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Hashes ``words`` ``[rows, 3]`` to 52 bits for each token id: int64 ``[rows, num_ids]``."""
    ids = torch.arange(num_ids, device=words.device)
    base = _mix32(ids ^ words[:, 0:1])  # [rows, num_ids]
    low = _mix32(base ^ words[:, 2:3]) >> (64 - _NUM_BITS)
    high = _mix32((base + words[:, 1:2]) & _MASK32)
    return high.bitwise_left_shift_(_NUM_BITS - 32).bitwise_or_(low)


def noise_rows(
    key: int, indices: Sequence[int], num_ids: int, device: torch.device | str
) -> torch.Tensor:
    """Returns finite standard Gumbel noise of ``indices``: float64 ``[len(indices), num_ids]``."""
    words = torch.tensor([row_words(key, index) for index in indices])
    words = to_device(words, torch.device(device))
    uniform = hash_bits(words, num_ids).double().add_(0.5).mul_(2.0**-_NUM_BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Applies a bijection of 32-bit words to each element; does not change ``x``."""
    x = x ^ (x >> 16)
    x.mul_(_MULTIPLIER_1).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15)
    x.mul_(_MULTIPLIER_2).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 16)


def _mix64(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
