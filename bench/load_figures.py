"""Figures of one load: throughput, percentiles, equality, and what the services did meanwhile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load_client import LoadAnswer, LoadRun

Samples = Mapping[str, float]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed (nearest rank).

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def parse_samples(text: str) -> dict[str, float]:
    """Values of an exposition in Prometheus' text format, by name; those with labels left out."""
    samples = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value and not name.startswith("#") and "{" not in name:
            samples[name] = float(value)
    return samples


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment, by process: Prometheus samples, and seconds of processor time."""

    at_s: float
    samples: Mapping[str, Samples]  # of "target" and "draft"
    cpu_s: Mapping[str, float]  # "target", "draft", "gateway", "clients"


def service_figures(before: Reading, after: Reading) -> dict[str, Any]:
    """What the processes did between two readings.

    ``cpu`` is processor seconds a second; ``busy`` and ``prefill`` are shares of the time in which
    the device thread worked. Rows and sequences are means over decoding forwards.
    """
    seconds = after.at_s - before.at_s
    figures: dict[str, Any] = {
        "cpu": {name: (after.cpu_s[name] - before.cpu_s[name]) / seconds for name in before.cpu_s}
    }
    for name, samples in after.samples.items():

        def rise(key: str, name: str = name, samples: Samples = samples) -> float:
            return samples.get(key, 0.0) - before.samples[name].get(key, 0.0)

        num_forwards = rise("hippo_forward_seconds_count")
        figures[name] = {
            "busy": rise("hippo_device_busy_seconds_total") / seconds,
            "prefill": rise("hippo_device_prefill_seconds_total") / seconds,
            "forwards_per_s": num_forwards / seconds,
            "rows_per_forward": _share(rise("hippo_rows_total"), num_forwards),
            "sequences_per_forward": _share(rise("hippo_forward_sequences_total"), num_forwards),
            "forward_ms": _share(1e3 * rise("hippo_forward_seconds_sum"), num_forwards),
        }
    return figures


def summarise_load(
    run: LoadRun, references: Mapping[int, tuple[int, ...]], services: Mapping[str, Any]
) -> dict[str, Any]:
    """One line of the table: ``references`` are the answers a clip that equality is judged by."""
    answers = run.counted
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    num_drafted = _total(answers, "num_draft_tokens")
    num_forwards = _total(answers, "num_forwards")
    num_accepted = _total(answers, "num_accepted_tokens")
    return {
        "num_answers": len(answers),
        "seconds": run.seconds,
        "tokens_per_s": sum(answer.num_tokens for answer in answers) / run.seconds,
        "answers_per_s": len(answers) / run.seconds,
        "tokens_per_answer": statistics.fmean(answer.num_tokens for answer in answers),
        "ttft_ms": _percentiles([answer.ttft_s for answer in answers]),
        "tpot_ms": _percentiles([answer.tpot_s for answer in answers]),
        "gap_ms": {**_percentiles(gaps), "max": 1e3 * max(gaps)} if gaps else None,
        "num_equal": sum(a.token_ids == references[a.clip_index] for a in answers),
        "acceptance_rate": _share(num_accepted, num_drafted),
        "tokens_per_forward": 1 + (_share(num_accepted, num_forwards) or 0.0),
        "dropped_share": _share(
            _total(answers, "num_dropped_tokens"), _total(answers, "num_drafted_tokens")
        ),
        "services": services,
    }


def typical_lines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line a system and number of clients, of several: that of median throughput, with the
    range of throughputs, and equality over the answers of all of them."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["system"], line["num_clients"]), []).append(line)
    typical = []
    for group in groups.values():
        ordered = sorted(group, key=lambda line: float(line["tokens_per_s"]))
        typical.append(
            {
                **ordered[(len(ordered) - 1) // 2],
                "tokens_per_s_range": [ordered[0]["tokens_per_s"], ordered[-1]["tokens_per_s"]],
                "num_runs": len(ordered),
                "num_equal": sum(line["num_equal"] for line in group),
                "num_answers": sum(line["num_answers"] for line in group),
            }
        )
    return typical


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": 1e3 * percentile(seconds, 0.5),
        "p99": 1e3 * percentile(seconds, 0.99),
    }


def _total(answers: Sequence[LoadAnswer], key: str) -> float:
    return float(sum(answer.figures[key] for answer in answers))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
