"""What a forward of the target takes, from every forward of recorded answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hippo.simulation.machine import StepTime, line_through

_LEAST_FORWARDS = 20
_OUTLIER = 1.3  # forwards that take so many times what was expected of them were disturbed


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A fitted forward, and what a block that arrives meanwhile adds to it."""

    time: StepTime
    message_ms: float


def fit_step(
    records: Sequence[Mapping[str, Any]],
    points: Sequence[tuple[float, float]] = (),
    contention: float = 0.0,
) -> TargetStep | None:
    """Least squares over all forwards of records with a timeline, no coefficient below 0.

    With ``points``, what more rows cost as it was measured by itself (``StepTime.points``), only
    its size is found, not its shape. ``contention`` is the share by which forwards are known to be
    slower while the draft computes: that is taken from them beforehand. None for records without
    a timeline, or with too few forwards. Each forward counts relative to its length. Those that
    something else held up (beyond what rows, context and blocks explain) are left out of a second
    pass.
    """
    rows = [row for record in records for row in _forwards(record, points, contention)]
    if len(rows) < _LEAST_FORWARDS:
        return None
    table = np.array(rows)
    features, measured = table[:, :-1], table[:, -1]
    for _ in range(2):
        found, _ = nnls(features / measured[:, None], np.ones(len(measured)))
        is_usual = measured < _OUTLIER * (features @ found)
        features, measured = features[is_usual], measured[is_usual]
    one_row, several, row, kilotoken, row_kilotoken, message = found.tolist()
    time = StepTime(
        one_row_ms=one_row,
        several_ms=0.0 if points else several,
        row_ms=row,
        kilotoken_ms=kilotoken,
        row_kilotoken_ms=row_kilotoken,
        points=tuple((rows, several * more_ms) for rows, more_ms in points),
    )
    return TargetStep(time, message)


def _forwards(
    record: Mapping[str, Any], points: Sequence[tuple[float, float]], contention: float
) -> list[list[float]]:
    """One line a forward: what StepTime multiplies, blocks that came meanwhile, milliseconds."""
    timeline = record["figures"].get("timeline_ms")
    if timeline is None:
        return []
    slower = 1 + contention * _overlap(record["figures"]) if contention else 1.0
    arrivals = [block["at"] for block in timeline["blocks"]]
    lines = []
    for verdict in timeline["verdicts"][1:]:
        more = verdict["rows"] - 1
        kilotokens = verdict["context"] / 1000
        end = bisect_left(arrivals, verdict["at"])
        begin = bisect_left(arrivals, verdict["at"] - verdict["forward"])
        by_rows: list[float] = [more > 0, more]
        if points:
            by_rows = [line_through(points, verdict["rows"]), 0.0]
        took = verdict["forward"] / slower
        lines.append([1.0, *by_rows, kilotokens, more * kilotokens, end - begin, took])
    return lines


def _overlap(figures: Mapping[str, Any]) -> float:
    """Share of the target's forwards in which the draft was at work, too."""
    times = figures["timings_ms"]
    if not figures["num_drafted_tokens"] or not times["target_forward"]:
        return 0.0
    both = times["decode"] - (times["draft_wait"] or 0.0) - times["target_wait"]
    return float(min(max(both / times["target_forward"], 0.0), 1.0))
