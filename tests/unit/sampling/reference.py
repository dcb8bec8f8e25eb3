"""A second, plain implementation of the token rule, one row and one id at a time."""

import math
from collections.abc import Sequence

import torch

from hippo.types import SamplingParams

MASK32 = 2**32 - 1
MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ x >> 16


def mix64(x: int) -> int:
    x &= MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def bits(seed: int, choice_index: int, index: int, token_id: int) -> int:
    key = mix64(mix64(seed) ^ mix64((choice_index + 1) * GOLDEN))
    first = mix64(key + (2 * index + 1) * GOLDEN)
    second = mix64(key + (2 * index + 2) * GOLDEN)
    base = mix32(token_id ^ first & MASK32)
    high = mix32(base + (first >> 32) & MASK32)
    low = mix32(base ^ second >> 32)
    return high << 20 | low >> 12


def noise(seed: int, choice_index: int, index: int, token_id: int) -> float:
    uniform = (bits(seed, choice_index, index, token_id) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def penalised(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """One row, in float32 steps."""
    row = logits.clone()
    for token_id in set(prompt) | set(output):
        if row[token_id] > 0:
            row[token_id] = row[token_id] / params.repetition_penalty
        else:
            row[token_id] = row[token_id] * params.repetition_penalty
    for token_id in set(output):
        row[token_id] -= params.frequency_penalty * list(output).count(token_id)
        row[token_id] -= params.presence_penalty
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    return [float(value) for value in row]


def survivors(scaled: Sequence[float], params: SamplingParams) -> set[int]:
    """Top-k, then top-p on what is left, then min-p."""
    kept = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(scaled[i] - scaled[kept[0]]) for i in kept]
        mass = 0.0
        nucleus = []
        for token_id, weight in zip(kept, weights, strict=True):
            nucleus.append(token_id)
            mass += weight / sum(weights)
            if mass >= params.top_p:
                break
        kept = nucleus
    floor = params.min_p * math.exp(scaled[kept[0]] - max(scaled))
    return {i for i in kept if math.exp(scaled[i] - max(scaled)) >= floor}


def token(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> int:
    """The token of completion index ``len(output)``."""
    row = penalised(logits, params, prompt, output)
    if params.temperature == 0:
        return row.index(max(row))
    scaled = [(value - max(row)) / params.temperature for value in row]
    scores = {
        i: scaled[i] + noise(params.seed, params.choice_index, len(output), i)
        for i in sorted(survivors(scaled, params))
    }
    return max(scores, key=lambda i: (scores[i], -i))
