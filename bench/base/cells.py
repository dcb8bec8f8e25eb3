"""The columns of the results' tables, for the terminal and for the page."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hippo.client.tables import interval, number

Result = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Makers of cells from a row's figures, by heading."""

LOAD_COLUMNS: Columns = {
    "system": lambda row: row["system"],
    "clients": lambda row: str(row["num_clients"]),
    "tokens/s": lambda row: _throughput(row),
    "TTFT ms p50 / p99": lambda row: f"{row['ttft_ms']['p50']:.0f} / {row['ttft_ms']['p99']:.0f}",
    "ms/token p50 / p99": lambda row: f"{row['tpot_ms']['p50']:.2f} / {row['tpot_ms']['p99']:.2f}",
    "gap ms p99 / max": lambda row: (
        f"{row['gap_ms']['p99']:.0f} / {row['gap_ms']['max']:.0f}" if row["gap_ms"] else "-"
    ),
    "tokens/forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "equal": lambda row: equal(row),
}
LATENCY_COLUMNS: Columns = {
    "system": lambda row: row["system"],
    "decode": lambda row: interval(row["decode_speedup"]),
    "end to end": lambda row: interval(row["end_to_end_speedup"]),
    "first token": lambda row: _share(row.get("first_token_share")),
    "ms/token": lambda row: f"{row['decode_ms_per_token']:.2f}",
    "TTFT ms": lambda row: f"{row['ttft_ms']:.0f}",
    "tokens/forward": lambda row: number(row["mean_tokens_per_forward"], ".2f"),
    "run length": lambda row: number(row["mean_run_length"], ".1f"),
    "step ms, target / draft": lambda row: (
        f"{number(row['target_step_ms'], '.2f')} / {number(row['draft_step_ms'], '.2f')}"
    ),
    "equal": lambda row: equal(row),
}
LEVEL_COLUMNS: Columns = {
    "draft": lambda row: row["draft"],
    "prompts, dtype, T": lambda row: f"{row['kind']}, {row['dtype']}, {row['temperature']:g}",
    "agreement": lambda row: f"{row['agreement']:.1%}",
    "run length": lambda row: f"{row['run_length']:.1f}",
    "tokens/forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "target-only ms/token": lambda row: f"{row['target_only_ms']:.2f}",
    "serial (γ)": lambda row: _at_best(row["serial"]),
    "vpsd (γ)": lambda row: _at_best(row["vpsd"]),
    "adaptive": lambda row: interval(row["adaptive"]["decode"]),
    "end to end": lambda row: f"{row['end_to_end']['mean']:.2f}",
    "first token": lambda row: _share(row.get("first_token")),
    "over serial": lambda row: interval(row["over_serial"]),
    "over vpsd": lambda row: interval(row["over_vpsd"]),
    "least over the better": lambda row: f"{row['least_over_better']:.2f}",
    "equal": lambda row: equal(row),
}


def cells(columns: Columns, rows: Iterable[Result]) -> Iterator[list[str]]:
    """Yields the cells of each row."""
    return ([make(row) for make in columns.values()] for row in rows)


def load_title(result: Result) -> str:
    """Returns the title of a load measurement."""
    prompts = f"{result['kind']} prompts, {result['dtype']}, T={result['temperature']:g}"
    return f"{prompts}, closed loop on two cores"


def equal(row: Result) -> str:
    """Formats the number of answers that equal target-only's."""
    return f"{row['num_equal']}/{row['num_answers']}"


def percent(value: Mapping[str, float], *, is_signed: bool = False) -> str:
    """Formats a share and half of its interval in percent."""
    half = 50 * (value["high"] - value["low"])
    return f"{100 * value['mean']:{'+.2f' if is_signed else '.2f'}} ±{half:.2f}"


def _throughput(row: Result) -> str:
    low, high = row["tokens_per_s_range"]
    spread = f" [{low:.0f}, {high:.0f}]" if row["num_runs"] > 1 else ""
    return f"{row['tokens_per_s']:.0f}{spread}"


def _share(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['mean']:.2f}"  # results of earlier trees lack it


def _at_best(policy: Result) -> str:
    return f"{policy['decode']['mean']:.2f} ({policy['gamma']})"
