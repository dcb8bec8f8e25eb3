"""An experiment's rows as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def percent(value: Mapping[str, float] | None, *, signed: bool = False) -> str:
    """A share with half its interval, in percent."""
    if value is None:
        return "-"
    half = 50 * (value["high"] - value["low"])
    form = "+.2f" if signed else ".2f"
    return f"{100 * value['mean']:{form}} ±{half:.2f}"


def figure(value: Mapping[str, float] | None, form: str = ".2f") -> str:
    """A figure with half its interval."""
    if value is None:
        return "-"
    half = (value["high"] - value["low"]) / 2
    return f"{value['mean']:{form}} ±{half:{form}}"


def number(value: float | None, form: str = ".2f") -> str:
    """A plain number, or a dash."""
    return "-" if value is None else format(value, form)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first to the right."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *[list(row) for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio_tables(result: Mapping[str, Any]) -> str:
    """Agreement, and accepted lengths by the simulator."""
    rows: Sequence[Row] = result["rows"]
    policies = list(rows[0]["readings"])
    head = ["draft sees"]
    for policy in policies:
        head += [f"{policy}: tokens/forward", "run length", "decode ×"]
    readings = []
    for row in rows:
        cells = [row["label"]]
        for policy in policies:
            found = row["readings"][policy]
            cells += [
                number(found["mean_tokens_per_forward"]),
                number(found["mean_run_length"], ".1f"),
                number(found["decode_speedup"]),
            ]
        readings.append(cells)
    machine = result["machine"]
    return (
        f"{agreement_table(result)}\n\n"
        "Both readings of accepted length, and the decode-only speedup, of the same traces by the "
        "discrete-event simulator (`hippo.speculation.simulator`), with the step times of `costs` "
        f"(target {machine['target_ms']:.2f} ms, draft {machine['draft_ms']:.3f} ms a token) and "
        "`bench.simulate_policies`'s transport and cost of rows. *tokens/forward*: "
        "`1 + accepted / forwards`. *run length*: tokens settled between two rejections.\n\n"
        f"{markdown(head, readings)}"
    )


def agreement_table(result: Mapping[str, Any]) -> str:
    """Agreement, and what each choice loses against seeing everything and against holistic."""
    return markdown(
        (
            "draft sees",
            "tokens kept",
            "agreement, %",
            "content words, %",
            "minus none",
            "minus holistic 0.9",
        ),
        [
            (
                row["label"],
                f"{row['kept_tokens']:.0f}",
                percent(row["agreement"]),
                percent(row["content_agreement"]),
                percent(row["minus none"], signed=True),
                percent(row["minus holistic 0.9"], signed=True),
            )
            for row in result["rows"]
        ],
    )


def first_token_table(result: Mapping[str, Any]) -> str:
    """Time to first token, and where it goes."""
    table = markdown(
        (
            "system", "requests", "TTFT ms", "TTFT / target-only", "target prefill ms",
            "of it scores ms", "draft prefill ms", "first block ready, %",
            "first block after first token, ms",
        ),
        [
            (
                row["system"],
                str(row["num_requests"]),
                f"{row['ttft_ms']:.0f}",
                figure(row["ttft_ratio"], ".4f"),
                number(row["target_prefill_ms"], ".1f"),
                number(row["selection_ms"], ".1f"),
                number(row["draft_prefill_ms"], ".1f"),
                number(_times(row.get("first_block_ready"), 100), ".1f"),
                number(row.get("first_block_late_ms"), ".0f"),
            )
            for row in result["rows"]
        ],
    )  # fmt: skip
    return (
        "Requests of 8 tokens, those of all systems in random order, each three times a clip; "
        "medians by clip. Target-only's own ratio is that of every other request over the rest: "
        f"how exact the figures are.\n\n{table}"
    )


def cost_tables(result: Mapping[str, Any]) -> str:
    """What the draft costs by ratio."""
    rows: Sequence[Row] = result["rows"]
    gammas = [key for key in rows[0] if key.startswith("draft_share")]
    first = rows[0]
    shared = (
        f"Not changed by the ratio: draft tower {figure(first['draft_tower_ms'], '.1f')} ms, "
        f"target tower {figure(first['target_tower_ms'], '.1f')} ms, target prefill "
        f"{figure(first['target_prefill_ms'], '.0f')} ms, target step "
        f"{figure(first['target_step_ms'])} ms."
    )
    table = markdown(
        (
            "ratio", "tokens kept", "draft cache of the prompt, KiB", "draft prefill, ms",
            "draft step, ms",
            *(f"draft's share of a serial round, {key[12:]}, %" for key in gammas),
        ),
        [
            (
                f"{row['ratio']:g}",
                f"{row['kept_tokens']['mean']:.0f}",
                f"{row['draft_cache_kib']['mean']:.0f}",
                figure(row["draft_prefill_ms"]),
                figure(row["draft_step_ms"], ".3f"),
                *(percent(row[key]) for key in gammas),
            )
            for row in rows
        ],
    )  # fmt: skip
    return f"{shared}\n\n{table}"


def bias_tables(result: Mapping[str, Any]) -> str:
    """Boundary shares in both readings."""
    return markdown(
        (
            "kept tenth", "outer ring, % of kept", "% of all", "kept / present",
            "first and last tenth, % of kept", "% of all", "kept / present",
        ),
        [
            (
                row["label"],
                percent(row["ring"]["kept"]),
                f"{100 * row['ring']['present']:.1f}",
                f"**{row['ring']['ratio']:.2f}**",
                percent(row["ends"]["kept"]),
                f"{100 * row['ends']['present']:.1f}",
                f"**{row['ends']['ratio']:.2f}**",
            )
            for row in result["rows"]
        ],
    )  # fmt: skip


def ablation_tables(result: Mapping[str, Any]) -> str:
    """A table for each thing changed."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        group, _, _ = row["label"].partition(": ")
        groups.setdefault(group, []).append(row)
    reference = next(
        key for key in result["rows"][0] if key.startswith("minus ") and key != "minus none"
    )
    parts = []
    for group, rows in groups.items():
        table = markdown(
            (group, "agreement, %", "content words, %", "minus none", "minus the default"),
            [
                (
                    row["label"].partition(": ")[2] or row["label"],
                    percent(row["agreement"]),
                    percent(row["content_agreement"]),
                    percent(row["minus none"], signed=True),
                    percent(row[reference], signed=True),
                )
                for row in rows
            ],
        )
        parts.append(table)
    return "\n\n".join(parts)


def kind_tables(result: Mapping[str, Any]) -> str:
    """Agreement by group."""
    rows: Sequence[Row] = result["rows"]
    labels = list(rows[0]["agreement"])
    return markdown(
        ("tokens of", "tokens", *labels),
        [
            (
                row["group"],
                f"{row['num_tokens']:,}",
                *(percent(row["agreement"][label]) for label in labels),
            )
            for row in rows
        ],
    )


def online_tables(result: Mapping[str, Any]) -> str:
    """A table for each group of systems."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault(str(row.get("num_frames", row["group"])), []).append(row)
    return "\n\n".join(
        f"**{name}{' frames' if name.isdigit() else ''}**, {rows[0]['num_clips']} clips\n\n"
        f"{_online_table(rows)}"
        for name, rows in groups.items()
    )


def _online_table(rows: Sequence[Row]) -> str:
    return markdown(
        (
            "system", "decode ×", "end to end ×", "acceptance, %", "tokens/forward", "run length",
            "TTFT ms", "TTFT / target-only", "first block ready, %",
            "first block after first token, ms", "serial: draft's share, %", "equal",
        ),
        [
            (
                row["system"],
                _interval(row["decode_speedup"]),
                _interval(row["end_to_end_speedup"]),
                number(_times(row["acceptance_rate"], 100), ".1f"),
                number(row["mean_tokens_per_forward"]),
                number(row["mean_run_length"], ".1f"),
                f"{row['ttft_ms']:.0f}",
                figure(row["ttft_ratio"], ".3f"),
                number(_times(row.get("first_block_ready", {}).get("mean"), 100), ".0f"),
                figure(row.get("first_block_late_ms"), ".0f"),
                number(_times(row.get("serial_draft_share"), 100), ".0f"),
                f"{row['num_equal']}/{row['num_answers']}",
            )
            for row in rows
        ],
    )  # fmt: skip


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
