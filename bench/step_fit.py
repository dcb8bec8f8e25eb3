"""What a forward of the target takes, from every forward of recorded answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hippo.simulation.machine import StepTime

_LEAST_FORWARDS = 20
_OUTLIER = 1.3  # forwards that take so many times what was expected of them were disturbed


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A fitted forward, and what a block that arrives meanwhile adds to it."""

    time: StepTime
    message_ms: float


def fit_step(records: Sequence[Mapping[str, Any]]) -> TargetStep | None:
    """Least squares over all forwards of records with a timeline, no coefficient below 0.

    None for records without one, or with too few forwards. Each forward counts relative to its
    length. Those that something else held up (beyond what rows, context and blocks explain) are
    left out of a second pass.
    """
    rows = [row for record in records for row in _forwards(record)]
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
        several_ms=several,
        row_ms=row,
        kilotoken_ms=kilotoken,
        row_kilotoken_ms=row_kilotoken,
    )
    return TargetStep(time, message)


def _forwards(record: Mapping[str, Any]) -> list[list[float]]:
    """One line a forward: what StepTime multiplies, blocks that came meanwhile, milliseconds."""
    timeline = record["figures"].get("timeline_ms")
    if timeline is None:
        return []
    arrivals = [block["at"] for block in timeline["blocks"]]
    lines = []
    for verdict in timeline["verdicts"][1:]:
        more = verdict["rows"] - 1
        kilotokens = verdict["context"] / 1000
        end = bisect_left(arrivals, verdict["at"])
        begin = bisect_left(arrivals, verdict["at"] - verdict["forward"])
        lines.append(
            [1.0, more > 0, more, kilotokens, more * kilotokens, end - begin, verdict["forward"]]
        )
    return lines
