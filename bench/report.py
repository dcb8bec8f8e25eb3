"""Tables for people and JSON for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench.measure import Record
from bench.summary import spread


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a system, in the order of measurement, with spreads over clips."""
    rows = []
    for name in dict.fromkeys(record.system for record in records):
        chosen = [record for record in records if record.system == name]

        def mean(key: str, chosen: Sequence[Record] = chosen) -> float | None:
            values = [record.answer.figures.get(key) for record in chosen]
            numbers = [float(value) for value in values if value is not None]
            return statistics.fmean(numbers) if numbers else None

        def timing(key: str, chosen: Sequence[Record] = chosen) -> float | None:
            values = [record.answer.figures["timings_ms"].get(key) for record in chosen]
            numbers = [float(value) for value in values if value is not None]
            return statistics.fmean(numbers) if numbers else None

        rows.append(
            {
                "system": name,
                "num_clips": len({record.clip for record in chosen}),
                "num_answers": len(chosen),
                "tokens_per_answer": statistics.fmean(r.answer.num_tokens for r in chosen),
                "decode_speedup": spread([r.decode_speedup for r in chosen]).as_dict(),
                "end_to_end_speedup": spread([r.end_to_end_speedup for r in chosen]).as_dict(),
                "decode_ms_per_token": statistics.fmean(
                    1e3 * r.answer.decode_s / max(r.answer.num_tokens - 1, 1) for r in chosen
                ),
                "ttft_ms": statistics.fmean(1e3 * r.answer.ttft_s for r in chosen),
                "num_equal": sum(r.is_equal for r in chosen),
                "mean_tokens_per_forward": mean("mean_tokens_per_forward"),
                "mean_run_length": mean("mean_run_length"),
                "acceptance_rate": mean("acceptance_rate"),
                "target_step_ms": timing("target_step"),
                "draft_step_ms": timing("draft_step"),
                "target_wait_ms": timing("target_wait"),
                "draft_wait_ms": timing("draft_wait"),
                "dropped_tokens": mean("num_dropped_tokens"),
                "transport_ms_per_round": timing("transport_per_round"),
            }
        )
    return rows


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The readable form of ``summarise``."""
    result = Table(title=title, title_justify="left")
    for column in (
        "system",
        "decode ×",
        "end to end ×",
        "ms/token",
        "TTFT ms",
        "tok/fwd",
        "run",
        "accept",
        "target waits ms",
        "dropped",
        "transport ms",
        "equal",
    ):
        result.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        decode, total = row["decode_speedup"], row["end_to_end_speedup"]
        result.add_row(
            row["system"],
            f"{decode['mean']:.2f} [{decode['low']:.2f}, {decode['high']:.2f}]",
            f"{total['mean']:.2f} [{total['low']:.2f}, {total['high']:.2f}]",
            f"{row['decode_ms_per_token']:.2f}",
            f"{row['ttft_ms']:.0f}",
            _show(row["mean_tokens_per_forward"], ".2f"),
            _show(row["mean_run_length"], ".1f"),
            _show(row["acceptance_rate"], ".3f"),
            _show(row["target_wait_ms"], ".0f"),
            _show(row["dropped_tokens"], ".0f"),
            _show(row["transport_ms_per_round"], ".2f"),
            f"{row['num_equal']}/{row['num_answers']}",
        )
    return result


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
