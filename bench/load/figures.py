"""The services' figures during a load, and the choice of one among repeated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hippo.client.figures import share

Samples = Mapping[str, float]


def parse_samples(text: str) -> dict[str, float]:
    """Parses Prometheus' text format; returns values by name, without series with labels."""
    samples = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value and not name.startswith("#") and "{" not in name:
            samples[name] = float(value)
    return samples


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one time, by process: Prometheus samples and seconds of processor time."""

    at_s: float
    samples: Mapping[str, Samples]  # of "target" and "draft"
    cpu_s: Mapping[str, float]  # "target", "draft", "gateway", "clients"


def service_figures(before: Reading, after: Reading) -> dict[str, Any]:
    """Returns the activity of the processes between two readings.

    ``cpu`` is processor seconds per second; ``busy`` and ``prefill`` are the shares of time
    that the device spent on all work and on prefills. Rows and sequences are means over decoding
    forwards.
    """
    seconds = after.at_s - before.at_s
    figures: dict[str, Any] = {
        "cpu": {name: (after.cpu_s[name] - before.cpu_s[name]) / seconds for name in before.cpu_s},
    }
    for name, samples in after.samples.items():

        def rise(key: str, name: str = name, samples: Samples = samples) -> float:
            return samples.get(key, 0.0) - before.samples[name].get(key, 0.0)

        num_forwards = rise("hippo_forward_seconds_count")
        figures[name] = {
            "busy": rise("hippo_device_busy_seconds_total") / seconds,
            "prefill": rise("hippo_device_prefill_seconds_total") / seconds,
            "forwards_per_s": num_forwards / seconds,
            "rows_per_forward": share(rise("hippo_rows_total"), num_forwards),
            "sequences_per_forward": share(rise("hippo_forward_sequences_total"), num_forwards),
            "forward_ms": share(1e3 * rise("hippo_forward_seconds_sum"), num_forwards),
        }
    return figures


def typical_lines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one line per system and number of clients: of repeated runs the one of median
    throughput, with the range of throughputs, and equality over the answers of all runs."""
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
