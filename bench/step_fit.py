"""What a forward of the target takes, and what a block takes from the draft's core: from every
forward and every block of recorded answers."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hippo.simulation.machine import StepTime, line_through

_LEAST_FORWARDS = 20
_PASSES = 3
# Forwards that take so many times what was expected of them were disturbed. Less is no disturbance:
# beside other tenants forwards of several rows take half as long again for a tenth of a second.
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A fitted forward, and what a block that arrives meanwhile adds to it."""

    time: StepTime
    message_ms: float


def fit_step(
    records: Sequence[Mapping[str, Any]],
    points: Sequence[tuple[float, float]] = (),
    contention: float = 0.0,
    message_ms: float = 0.0,
) -> TargetStep | None:
    """Least squares over all forwards of records with a timeline, no coefficient below 0.

    With ``points``, milliseconds by rows as they were measured by themselves, behind as many cached
    tokens as the records have on the average, what is found is one row's time, which tells the
    machine's speed, and what any several rows take longer in a service; ``message_ms`` is then what
    each block that arrives meanwhile takes, which is not told from what rows cost where every
    forward has as many. ``contention`` is the share by which forwards are known to be slower while
    the draft computes: that is taken from them beforehand. None for records without a timeline, or
    with too few forwards. Each forward counts relative to what is expected of one like it (to what
    itself took, slow ones would count less, and the fit be below the mean). Those that something
    else held up (beyond what rows, context and blocks explain) are left out of later passes.
    """
    rows = [row for record in records for row in _forwards(record, points, contention)]
    if len(rows) < _LEAST_FORWARDS:
        return None
    table = np.array(rows)
    if points:
        table[:, -1] -= message_ms * table[:, -2]
        table = np.delete(table, -2, 1)
    features, measured = table[:, :-1], table[:, -1]
    expected = np.full(len(measured), measured.mean())
    for _ in range(_PASSES):
        found, _ = nnls(features / expected[:, None], measured / expected)
        expected = features @ found
        is_usual = measured < _OUTLIER * expected
        features, measured, expected = features[is_usual], measured[is_usual], expected[is_usual]
    if points:
        one_row, several = found.tolist()
        speed = one_row / points[0][1]
        over_one = [(rows, max(0.0, speed * took - one_row + several)) for rows, took in points[1:]]
        return TargetStep(StepTime(one_row_ms=one_row, points=((1.0, 0.0), *over_one)), message_ms)
    one_row, several, row, kilotoken, row_kilotoken, message = found.tolist()
    time = StepTime(
        one_row_ms=one_row,
        several_ms=several,
        row_ms=row,
        kilotoken_ms=kilotoken,
        row_kilotoken_ms=row_kilotoken,
    )
    return TargetStep(time, message)


@dataclass(frozen=True, slots=True)
class Preemption:
    """How long others keep the draft from its core, in milliseconds."""

    block_ms: float  # for each block, which goes through the gateway
    verdict_ms: float  # for each verdict: its text and stream, and the commit to the draft


def fit_preemption(records: Sequence[Mapping[str, Any]]) -> Preemption | None:
    """Least squares over all blocks of records with a timeline; None without, or with too few.

    A verdict costs no less than a block: the commit that follows it is a message to the draft, too.
    """
    rows = []
    for record in records:
        timeline = record["figures"].get("timeline_ms")
        if timeline is None:
            continue
        verdicts = [verdict["at"] for verdict in timeline["verdicts"]]
        for before, block in itertools.pairwise(timeline["blocks"]):
            num_verdicts = bisect_left(verdicts, block["at"]) - bisect_left(verdicts, before["at"])
            rows.append([1.0 + num_verdicts, num_verdicts, block["preempted"]])
    if len(rows) < _LEAST_FORWARDS:
        return None
    table = np.array(rows)
    (message_ms, text_ms), _ = nnls(table[:, :-1], table[:, -1])
    return Preemption(float(message_ms), float(message_ms + text_ms))


def _forwards(
    record: Mapping[str, Any], points: Sequence[tuple[float, float]], contention: float
) -> list[list[float]]:
    """One line a forward: what is multiplied to explain it, blocks that came meanwhile, ms."""
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
        causes = [1.0, more > 0, more, kilotokens, more * kilotokens]
        if points:
            causes = [line_through(points, verdict["rows"]) / points[0][1], more > 0]
        lines.append([*causes, end - begin, verdict["forward"] / slower])
    return lines


def _overlap(figures: Mapping[str, Any]) -> float:
    """Share of the target's forwards in which the draft was at work, too."""
    times = figures["timings_ms"]
    if not figures["num_drafted_tokens"] or not times["target_forward"]:
        return 0.0
    both = times["decode"] - (times["draft_wait"] or 0.0) - times["target_wait"]
    return float(min(max(both / times["target_forward"], 0.0), 1.0))
