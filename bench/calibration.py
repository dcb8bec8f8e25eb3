"""What ``bench.calibrate`` found out, as ``bench.simulate_fit`` uses it: the mean of all rounds."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SIDES = ("target", "draft")
_LATE_MS = 0.3  # beyond what a message takes to a core that idles

Points = tuple[tuple[float, float], ...]
Rounds = dict[str, dict[str, dict[str, list[float]]]]  # by side, kind and rows: ms a round
BlockRounds = dict[str, list[list[float]]]  # by side: ms a block, and ms of it without its core


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of each side: milliseconds by rows, alone, the share by which steps beside the other one's
    are slower, and the milliseconds by rows that the steps behind a rest of 16 ms take longer. Of
    messages to a core that computes: the share that waits, and how long these wait on the average.
    The milliseconds by which a block makes the target's step longer (None: that was not measured),
    and the share of the time for which others have the draft's core about a block by which its
    step takes longer besides.
    """

    step_ms: Mapping[str, Points]
    contention: Mapping[str, float]
    cold_ms: Mapping[str, Points]
    late_share: float = 0.0
    late_ms: float = 0.0
    block_ms: float | None = None
    draft_disturbance: float = 0.0


def read_calibrations(paths: Sequence[Path], dtype: str) -> Calibration:
    """From what ``bench.calibrate`` wrote, all rounds together; ValueError when one is of another
    dtype."""
    rounds: Rounds = {side: defaultdict(lambda: defaultdict(list)) for side in SIDES}
    delays_ms: dict[str, list[float]] = defaultdict(list)
    blocks_ms: BlockRounds = {side: [] for side in SIDES}
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["dtype"] != dtype:
            raise ValueError(f"{path} was measured in {document['dtype']}, not in {dtype}")
        for side, kinds in document["rounds_ms"].items():
            for kind, by_rows in kinds.items():
                for rows, values in by_rows.items():
                    rounds[side][kind][rows] += values
        for core, values in document["delays_ms"].items():
            delays_ms[core] += values
        for side in SIDES:
            blocks_ms[side] += document["blocks_ms"][side]
    return calibration_of(rounds, delays_ms, blocks_ms)


def calibration_of(
    rounds: Rounds,
    delays_ms: Mapping[str, Sequence[float]],
    blocks_ms: BlockRounds | None = None,
) -> Calibration:
    """Of rounds by side, kind and rows (``bench.calibrate.measure``), of messages' delays on a core
    that idles and on one that steps, and of what a block took in each round (``measure_blocks``);
    what anything takes longer is never below 0."""
    step_ms, contention, cold_ms = {}, {}, {}
    for side, kinds in rounds.items():
        alone, beside, behind = (
            {rows: statistics.mean(values) for rows, values in kinds[kind].items()}
            for kind in ("alone", "beside", "behind a rest")
        )
        step_ms[side] = tuple(sorted((float(rows), took) for rows, took in alone.items()))
        share = sum(beside.values()) / sum(alone[rows] for rows in beside)
        contention[side] = max(0.0, share - 1)
        cold_ms[side] = tuple(
            sorted((float(rows), max(0.0, took)) for rows, took in behind.items())
        )
    usual_ms = statistics.median(delays_ms["idle"])
    excess = [delay - usual_ms for delay in delays_ms["busy"]]
    late = [value for value in excess if value > _LATE_MS]
    late_ms = statistics.mean(late) if late else 0.0
    block_ms, disturbance = None, 0.0
    if blocks_ms is not None:
        block_ms = max(0.0, statistics.mean(took for took, _ in blocks_ms["target"]))
        took, waited = (sum(values) for values in zip(*blocks_ms["draft"], strict=True))
        disturbance = max(0.0, took / waited - 1)
    return Calibration(
        step_ms,
        contention,
        cold_ms,
        late_share=len(late) / len(excess),
        late_ms=late_ms,
        block_ms=block_ms,
        draft_disturbance=disturbance,
    )
