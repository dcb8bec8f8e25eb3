"""The same measurement several times: all its answers, and how far single runs are off the mean."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def all_records(repeats: Sequence[Sequence[Record]]) -> list[Record]:
    """The records of every run, whose sums over runs stand for the mean of them.

    The machine is as slow in a run for one system as for another, so their means compare, where
    medians take each answer from a run of its own. Raises ValueError when a system was not asked
    about the same clips each time, or answered otherwise.
    """
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for records in repeats:
        for record in records:
            found[record["system"], record["clip"]].append(record)
    for (system, clip), same in found.items():
        if len({record["num_tokens"] for record in same}) > 1 or len(same) % len(repeats):
            raise ValueError(f"{system} on {clip} is not the same answer in every file")
    return [record for records in repeats for record in records]


def run_noise(
    repeats: Sequence[Sequence[Record]], system: str, clips: Collection[str]
) -> float | None:
    """Percent by which a run's decode time over these clips differs from the runs' mean, on the
    average; None for fewer than two runs."""
    if len(repeats) < 2:
        return None
    totals = [
        sum(_decode_ms(r) for r in records if r["system"] == system and r["clip"] in clips)
        for records in repeats
    ]
    mean = statistics.mean(totals)
    return 100 * statistics.mean(abs(total / mean - 1) for total in totals)


def _decode_ms(record: Record) -> float:
    decode: float = record["figures"]["timings_ms"]["decode"]
    return decode
