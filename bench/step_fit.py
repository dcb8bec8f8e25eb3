"""What a forward of the target takes, and what a block takes from the draft's core: from every
forward and every block of recorded answers."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hippo.simulation.machine import StepTime, line_through
from hippo.speculation.virtual_time import COLD_AFTER_NS, start_coldness

Points = Sequence[tuple[float, float]]

_LEAST_FORWARDS = 20
_NUM_STARTING = 10  # forwards of an answer, in which the weights come back to the cache
_PASSES = 3
# Forwards that take so many times what was expected of them were disturbed. Less is no disturbance:
# beside other tenants forwards of several rows take half as long again for a tenth of a second.
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A fitted forward, what a block that arrives meanwhile adds to it, and how cold the first one
    behind a prompt is (``Machine.target_cold_start``)."""

    time: StepTime
    message_ms: float
    cold_start: float = 0.0


def fit_step(records: Sequence[Mapping[str, Any]]) -> TargetStep | None:
    """Least squares over all forwards of records with a timeline, no coefficient below 0.

    None for records without a timeline, or with too few forwards. Each forward counts relative to
    what is expected of one like it (to what itself took, slow ones would count less, and the fit be
    below the mean). Those that something else held up (beyond what rows, context and blocks
    explain) are left out of later passes.
    """
    rows = []
    for forward in _forwards(records):
        more, kilotokens = forward.num_rows - 1, forward.context / 1000
        causes = [1.0, more > 0, more, kilotokens, more * kilotokens, forward.num_blocks]
        rows.append([*causes, forward.took_ms])
    if len(rows) < _LEAST_FORWARDS:
        return None
    table = np.array(rows)
    features, measured = table[:, :-1], table[:, -1]
    expected = np.full(len(measured), measured.mean())
    for _ in range(_PASSES):
        found, _ = nnls(features / expected[:, None], measured / expected)
        expected = features @ found
        is_usual = measured < _OUTLIER * expected
        features, measured, expected = features[is_usual], measured[is_usual], expected[is_usual]
    one_row, several, row, kilotoken, row_kilotoken, message = found.tolist()
    time = StepTime(
        one_row_ms=one_row,
        several_ms=several,
        row_ms=row,
        kilotoken_ms=kilotoken,
        row_kilotoken_ms=row_kilotoken,
    )
    return TargetStep(time, message)


def seen_step(
    records: Sequence[Mapping[str, Any]],
    points: Points,
    *,
    contention: float = 0.0,
    message_ms: float = 0.0,
    cold_points: Points = ((1.0, 0.0),),
    cold_start: float = 0.0,
) -> StepTime | None:
    """The mean forward by number of rows, of records with a timeline; None with too few forwards.

    Numbers of rows that few places of the answers show, however often these were repeated (they are
    answers' last forwards, behind the longest contexts), take what was measured by itself
    (``points``, from one row on, milliseconds, behind as many cached tokens as the records have on
    the average), at the speed of the seen ones around them. From each forward is taken beforehand
    what the simulator adds to it: the share ``contention`` while the draft computes, ``message_ms``
    for each block that arrives meanwhile, ``cold_points`` (milliseconds by rows) behind a rest, and
    the share ``cold_start`` of these behind the prompt.
    """
    cold = StepTime(one_row_ms=0.0, cold_points=tuple(cold_points))
    seen, places = defaultdict(list), defaultdict(set)
    for forward in _forwards(records):
        coldness = min(1.0, forward.wait_ms * 1e6 / COLD_AFTER_NS)
        coldness = max(coldness, cold_start * start_coldness(forward.place[2]))
        bare_ms = forward.took_ms - message_ms * forward.num_blocks
        bare_ms /= 1 + contention * forward.overlap
        bare_ms -= coldness * cold.cold_ms(forward.num_rows)
        seen[float(forward.num_rows)].append(bare_ms)
        places[float(forward.num_rows)].add(forward.place)
    often = [rows for rows in seen if len(places[rows]) >= _LEAST_FORWARDS]
    means = {rows: _usual_mean(seen[rows]) for rows in often}
    if not means:
        return None
    speeds = sorted((rows, took / line_through(points, rows)) for rows, took in means.items())
    least, most = speeds[0][0], speeds[-1][0]

    def expected(rows: float) -> float:
        speed = line_through(speeds, min(max(rows, least), most))
        return line_through(points, rows) * speed

    one_row = expected(1.0)
    known = sorted({rows for rows, _ in points} | set(means))
    over_one = tuple((rows, expected(rows) - one_row) for rows in known)
    return StepTime(one_row_ms=one_row, points=over_one)


def fit_cold_start(baseline: Sequence[Mapping[str, Any]], cold_ms: float) -> float:
    """By what share of ``cold_ms`` (one row, behind a rest) the first forward behind a prompt is
    slower than the later ones: least squares over the first forwards of target-only answers with a
    timeline; 0 without."""
    by_number = defaultdict(list)
    for forward in _forwards(baseline):
        if forward.num_rows == 1:
            by_number[min(forward.place[2], _NUM_STARTING)].append(forward.took_ms)
    if _NUM_STARTING not in by_number or not cold_ms:
        return 0.0
    usual_ms = _usual_mean(by_number.pop(_NUM_STARTING))
    shares = {number: start_coldness(number) for number in by_number}
    more = sum(
        shares[number] * (_usual_mean(took) - usual_ms) for number, took in by_number.items()
    )
    return max(0.0, more / sum(share**2 for share in shares.values()) / cold_ms)


def _usual_mean(values: Sequence[float]) -> float:
    """Without those that something held up."""
    most = _OUTLIER * fmean(values)
    return fmean(value for value in values if value < most)


@dataclass(frozen=True, slots=True)
class _Forward:
    num_rows: int
    context: int
    took_ms: float
    wait_ms: float  # of the device for the draft, before it
    num_blocks: int  # that arrived meanwhile
    overlap: float  # share of it in which the draft was at work, the mean of its answer
    place: tuple[str, str, int]  # system, clip, and which of the answer's forwards


def _forwards(records: Sequence[Mapping[str, Any]]) -> Iterator[_Forward]:
    """Those of records with a timeline, without the prefills."""
    for record in records:
        timeline = record["figures"].get("timeline_ms")
        if timeline is None:
            continue
        overlap = _overlap(record["figures"])
        arrivals = [block["at"] for block in timeline["blocks"]]
        for number, verdict in enumerate(timeline["verdicts"][1:]):
            end = bisect_left(arrivals, verdict["at"])
            begin = bisect_left(arrivals, verdict["at"] - verdict["forward"])
            yield _Forward(
                num_rows=verdict["rows"],
                context=verdict["context"],
                took_ms=verdict["forward"],
                wait_ms=verdict["wait"],
                num_blocks=end - begin,
                overlap=overlap,
                place=(record["system"], record["clip"], number),
            )


def _overlap(figures: Mapping[str, Any]) -> float:
    """Share of the target's forwards in which the draft was at work, too."""
    times = figures["timings_ms"]
    if not figures["num_drafted_tokens"] or not times["target_forward"]:
        return 0.0
    both = times["decode"] - (times["draft_wait"] or 0.0) - times["target_wait"]
    return float(min(max(both / times["target_forward"], 0.0), 1.0))
