"""What gateway, client and the draft's other threads do on its core, from what bench.round_time
counted under the policy that is learnt from and its baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.systems import TARGET_ONLY, policy_of

_NOT_OTHERS = ("draft device", "idle")


@dataclass(frozen=True, slots=True)
class CoreWork:
    """Milliseconds of the draft's core, where gateway and client share it."""

    message_ms: float  # a block that is relayed, or a commit
    verdict_ms: float  # its text and stream
    token_ms: float  # the same, for each of its tokens


def read_core_work(paths: Sequence[Path], dtype: str, system: str) -> CoreWork:
    """From what ``bench.round_time`` wrote about ``system`` (such as "serial": at all block
    lengths) and target-only; ValueError when one of these is missing or of another dtype."""
    rounds: list[Mapping[str, Any]] = []
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["dtype"] != dtype:
            raise ValueError(f"{path} was measured in {document['dtype']}, not in {dtype}")
        rounds += [
            each
            for each in document["systems"]
            if each["system"] == TARGET_ONLY
            or system in (each["system"], policy_of(each["system"]).name)
        ]
    names = {each["system"] for each in rounds}
    if TARGET_ONLY not in names or len(names) < 2:
        raise ValueError(
            f"{', '.join(map(str, paths))}: there must be rounds of target-only and of {system}"
        )
    return core_work_of(rounds)


def core_work_of(rounds: Sequence[Mapping[str, Any]]) -> CoreWork:
    """Least squares over rounds (``bench.round_time.breakdown``): each is a verdict, with a commit
    where there is a draft, and has so many blocks and tokens."""
    table, work = [], []
    for each in rounds:
        num_messages = each["blocks_per_round"] + (each["system"] != TARGET_ONLY)
        table.append([num_messages, 1.0, each["tokens_per_round"]])
        threads = each["cores"]["draft"]
        work.append(sum(took for name, took in threads.items() if name not in _NOT_OTHERS))
    (message_ms, verdict_ms, token_ms), _ = nnls(np.array(table), np.array(work))
    return CoreWork(float(message_ms), float(verdict_ms), float(token_ms))
