"""Figures of answers: means with intervals, percentiles, a row per system."""

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from hippo.client.answers import Answer
from hippo.client.latency import Record

Row = dict[str, Any]

_NUM_RESAMPLES = 2000
_MEANS = ("mean_tokens_per_forward", "mean_run_length", "acceptance_rate")
_TIMINGS = ("target_step", "draft_step", "target_wait", "draft_wait")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, 95 % bootstrap interval and range of the values, to four decimals.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values to summarise")
    rng = random.Random(0)
    means = sorted(
        statistics.fmean(rng.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES)
    )
    found = {
        "mean": statistics.fmean(values),
        "low": means[int(0.025 * _NUM_RESAMPLES)],
        "high": means[int(0.975 * _NUM_RESAMPLES) - 1],
        "minimum": min(values),
        "maximum": max(values),
    }
    return {name: round(value, 4) for name, value in found.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of the values do not exceed (the
    nearest-rank method). Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def summarise(records: Sequence[Record]) -> list[Row]:
    """Returns a row per system, in the order of measurement, with spreads over questions."""
    names = dict.fromkeys(record.system for record in records)
    return [_row(name, [each for each in records if each.system == name]) for name in names]


def _row(name: str, records: Sequence[Record]) -> Row:
    figures = [record.figures for record in records]
    timings = [each["timings_ms"] for each in figures]
    return {
        "system": name,
        "num_clips": len({record.clip for record in records}),
        "num_answers": len(records),
        "tokens_per_answer": statistics.fmean(r.answer.num_tokens for r in records),
        "decode_speedup": spread([r.decode_speedup for r in records]),
        "end_to_end_speedup": spread([r.end_to_end_speedup for r in records]),
        "first_token_share": spread([r.first_token_share for r in records]),
        "decode_ms_per_token": statistics.fmean(1e3 * r.answer.decode_s_per_token for r in records),
        "ttft_ms": statistics.fmean(1e3 * r.answer.ttft_s for r in records),
        "num_equal": sum(r.is_equal for r in records),
        **{name: _mean([each.get(name) for each in figures]) for name in _MEANS},
        "dropped_tokens": _mean([each.get("num_dropped_tokens") for each in figures]),
        **{f"{name}_ms": _mean([each.get(name) for each in timings]) for name in _TIMINGS},
        "transport_ms_per_round": _mean([each.get("transport_per_round") for each in timings]),
    }


def notes_on(records: Sequence[Record]) -> list[str]:
    """Returns sentences on unequal answers, and on answers in which no draft took part."""
    notes = []
    if unequal := sum(not record.is_equal for record in records):
        notes.append(
            f"{unequal} of {len(records)} answers differ from target-only's: expected in "
            "bfloat16 at times, never in float32"
        )
    problems = dict.fromkeys(
        record.figures["draft_problem"]
        for record in records
        if record.figures["policy"] != "off" and not record.figures["draft_used"]
    )
    notes += [f"no draft took part in some answers: {each}" for each in problems if each]
    return notes


def summarise_alone(name: str, answers: Sequence[Answer]) -> Row:
    """Returns a row for any server, with times on the client's clock."""
    return {
        "system": name,
        "num_answers": len(answers),
        "tokens_per_answer": statistics.fmean(answer.num_tokens for answer in answers),
        "ttft_ms": spread([1e3 * answer.ttft_s for answer in answers]),
        "ms_per_token": spread([1e3 * answer.tpot_s for answer in answers]),
        "end_to_end_ms": spread([1e3 * answer.end_to_end_s for answer in answers]),
        "tokens_per_s": spread([answer.num_tokens / answer.end_to_end_s for answer in answers]),
        "num_cached_tokens": _mean([answer.num_cached_tokens for answer in answers]),
        "counted_by": sorted({answer.counted_by for answer in answers}),
    }


def distributions(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Returns the answers' times in milliseconds, by the label of their axis."""
    return {
        "ms to the first token": [1e3 * each.ttft_s for each in answers],
        "ms a token after it": [1e3 * each.tpot_s for each in answers],
        "ms end to end": [1e3 * each.end_to_end_s for each in answers],
    }


def share(part: float | None, whole: float | None) -> float | None:
    """Returns ``part / whole``; None if ``part`` is None or ``whole`` is None or 0."""
    return part / whole if part is not None and whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [float(value) for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None
