"""The tables of pruning experiments, as Markdown for the terminal and the page."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.answers.systems import TARGET_ONLY
from bench.base.cells import Columns, cells, percent
from hippo.client.tables import interval, markdown, number

Result = Mapping[str, Any]


def plus_minus(value: Mapping[str, float]) -> str:
    """Formats a number and half of its interval."""
    return f"{value['mean']:.2f} ±{(value['high'] - value['low']) / 2:.2f}"


def accepted_tokens(agreement: Mapping[str, float]) -> str:
    """Formats mean accepted tokens: a / (1 - a) of an agreement.

    These are the draft tokens from one rejection to the next, without the corrected token (PEARL).
    """
    mean = agreement["mean"]
    return f"{mean / (1 - mean):.1f}" if mean < 1 else "∞"


def markdown_tables(name: str, result: Result) -> list[str]:
    """Returns the tables of experiment ``name``, each after a line that says what it shows."""
    makers: Mapping[str, Callable[[Result], list[str]]] = {
        "services": _services,
        "ablation": _ablation,
        "bias": _bias,
        "frames": _frames,
    }
    return makers.get(name, _ratios)(result)


def _ratios(result: Result) -> list[str]:
    has_speed = "step_times" in result
    rows = {row["label"]: row for row in result["rows"]}
    what = "Agreement in percent (its difference from seeing every token); mean accepted tokens"
    what += "; decode speedup of adaptive, replayed:" if has_speed else ":"
    times = _draft_times(result["step_times"]) if has_speed else ()
    return [what, _by_ratio({label: _ratio_cell(row) for label, row in rows.items()}), *times]


def _ratio_cell(row: Result) -> str:
    difference = f"{100 * row['minus none']['mean']:+.2f}"
    parts = [f"{percent(row['agreement'])} ({difference})", accepted_tokens(row["agreement"])]
    if "decode_speedup" in row:
        parts.append(plus_minus(row["decode_speedup"]))
    return "; ".join(parts)


def _draft_times(times: Mapping[str, Any]) -> list[str]:
    ratios = list(times["draft_step_ms"])
    rows = [
        [name, *(f"{times[key][ratio]:.2f}" for ratio in ratios)]
        for name, key in (
            ("prefill, without the vision tower", "draft_prefill_ms"),
            ("step", "draft_step_ms"),
        )
    ]
    return [
        f"Times in ms on a prompt of {times['num_prompt_tokens']} tokens, medians: the target's "
        f"forwards of {_forwards(times)}; the draft's by ratio:",
        markdown(["draft, ms", *ratios], rows),
    ]


def _forwards(times: Mapping[str, Any]) -> str:
    return ", ".join(f"{rows} rows {ms:.2f}" for rows, ms in times["target_ms"].items())


_SPEED: Columns = {
    "accepted tokens": lambda row: accepted_tokens(row["agreement"]),
    "decode speedup": lambda row: plus_minus(row["decode_speedup"]),
}


def _table(columns: Columns, rows: Iterable[Result]) -> str:
    return markdown(tuple(columns), cells(columns, rows))


def _ablation(result: Result) -> list[str]:
    """Returns a row per variant, without the variants that equal the first row."""
    keys = (key for key in result["rows"][0] if key.startswith("minus "))
    reference = next(key for key in keys if key != "minus none")
    shown = [
        row
        for row in result["rows"]
        if row["label"] == reference.removeprefix("minus ") or any(row[reference].values())
    ]
    columns: Columns = {
        "choice of visual tokens": lambda row: row["label"],
        "agreement, %": lambda row: percent(row["agreement"]),
        "minus the first row": lambda row: percent(row[reference], is_signed=True),
        **_SPEED,
    }
    times = result["step_times"]
    draft = times["draft_step_ms"]
    ratio = f"{result['ratio']:g}" if f"{result['ratio']:g}" in draft else "0.9"
    return [
        f"Ratio {result['ratio']:g}; decode speedups are replays of adaptive at these times, "
        f"ms: the target's forward of {_forwards(times)}; the draft's step {draft[ratio]:.2f} at "
        f"ratio {ratio}, {draft['0']:.2f} unpruned:",
        _table(columns, shown),
    ]


def _bias(result: Result) -> list[str]:
    """Returns a row per score. For each boundary it has the share of the highest tenth of the
    scores there, the share of all tokens, and the first over the second."""
    grids = ", ".join(f"{grid} ({number} clips)" for grid, number in result["grids"].items())
    columns: Columns = {
        "score": lambda row: row["label"],
        "outer ring: kept, %": lambda row: percent(row["ring"]),
        "ring: present, %": lambda row: f"{100 * row['ring, all']['mean']:.1f}",
        "ring: kept over present": lambda row: plus_minus(row["ring, over all"]),
        "ends: kept, %": lambda row: percent(row["ends"]),
        "ends: present, %": lambda row: f"{100 * row['ends, all']['mean']:.1f}",
        "ends: kept over present": lambda row: plus_minus(row["ends, over all"]),
    }
    return [f"Grids of a frame: {grids}.", _table(columns, result["rows"])]


def _frames(result: Result) -> list[str]:
    columns: Columns = {
        "frames, choice": lambda row: row["label"],
        "prompt tokens": lambda row: f"{row['prompt_tokens']:g}",
        "visual tokens kept": lambda row: f"{row['kept_tokens']:g}",
        "agreement, %": lambda row: percent(row["agreement"]),
        "minus none": lambda row: percent(row["minus none"], is_signed=True),
        **_SPEED,
    }
    return [_table(columns, result["rows"])]


def _services(result: Result) -> list[str]:
    rows = [row for row in result["rows"] if row["system"] != TARGET_ONLY]
    alone = next(row for row in result["rows"] if row["system"] == TARGET_ONLY)
    num_equal = sum(row["num_equal"] for row in rows)
    columns: Columns = {
        "choice, ratio": lambda row: row["system"],
        "decode": lambda row: interval(row["decode_speedup"]),
        "end to end": lambda row: interval(row["end_to_end_speedup"]),
        "end to end, ms": lambda row: f"{row['end_to_end_ms']:.0f}",
        "draft's prefill, ms": lambda row: number(row["draft_prefill_ms"], ".0f"),
        "accepted tokens": lambda row: number(row["accepted_tokens"], ".1f"),
        "tokens a pass": lambda row: number(row["mean_tokens_per_forward"], ".1f"),
        "acceptance": lambda row: number(row["acceptance_rate"], ".2f"),
    }
    return [
        f"{num_equal} of {sum(row['num_answers'] for row in rows)} answers equal target-only's, "
        f"which takes {alone['end_to_end_ms']:.0f} ms end to end; speedups with 95 % intervals:",
        _table(columns, rows),
    ]


def _by_ratio(cells: Mapping[str, str]) -> str:
    """Returns a table with a row per strategy and a column per ratio, from cells by
    ``"STRATEGY RATIO"``; a system without a ratio has its cell in the first column."""
    table: dict[str, dict[str, str]] = {}
    for name, cell in cells.items():
        strategy, _, last = name.rpartition(" ")
        has_ratio = last.replace(".", "").isdecimal()
        table.setdefault(strategy if has_ratio else name, {})[last if has_ratio else ""] = cell
    ratios = sorted({ratio for row in table.values() for ratio in row})
    rows = [[name, *(row.get(ratio, "") for ratio in ratios)] for name, row in table.items()]
    return markdown(["strategy, ratio", *(ratio or "as it is" for ratio in ratios)], rows)
