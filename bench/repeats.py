"""The same measurement several times: each answer's median run, and how far single runs are off."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def median_records(repeats: Sequence[Sequence[Record]]) -> list[Record]:
    """Of each system on each clip the record of median decode time; of two, the faster one.

    Target-only is asked twice a clip and run: it keeps both middle ones. Raises ValueError when a
    system was not asked about the same clips each time, or answered otherwise.
    """
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for records in repeats:
        for record in records:
            found[record["system"], record["clip"]].append(record)
    chosen = []
    for (system, clip), same in found.items():
        if len({record["num_tokens"] for record in same}) > 1 or len(same) % len(repeats):
            raise ValueError(f"{system} on {clip} is not the same answer in every file")
        ranked = sorted(same, key=_decode_ms)
        middle, is_asked_twice = (len(ranked) - 1) // 2, len(ranked) > len(repeats)
        chosen += ranked[middle : len(ranked) // 2 + 1] if is_asked_twice else [ranked[middle]]
    return chosen


def run_noise(
    repeats: Sequence[Sequence[Record]], system: str, clips: Collection[str]
) -> float | None:
    """Percent by which a run's decode time over these clips differs from the runs' median, on the
    average; None for fewer than two runs."""
    if len(repeats) < 2:
        return None
    totals = [
        sum(_decode_ms(r) for r in records if r["system"] == system and r["clip"] in clips)
        for records in repeats
    ]
    middle = statistics.median(totals)
    return 100 * statistics.mean(abs(total / middle - 1) for total in totals)


def _decode_ms(record: Record) -> float:
    decode: float = record["figures"]["timings_ms"]["decode"]
    return decode
