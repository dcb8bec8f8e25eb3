"""The cells of the results' tables, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hippo.client.tables import interval, number

Result = Mapping[str, Any]

LOAD_COLUMNS = (
    *("system", "clients", "tokens/s", "answers/s", "TTFT ms p50 / p99", "ms/token p50 / p99"),
    *("gap ms p99 / max", "acceptance", "tokens/forward", "equal"),
)
LATENCY_COLUMNS = (
    *("system", "decode", "slowest clip", "end to end", "ms/token", "TTFT ms", "tokens/forward"),
    *("run length", "acceptance", "target waits ms", "dropped", "transport ms/round"),
    *("step ms, target / draft", "equal"),
)
LEVEL_COLUMNS = (
    *("draft", "prompts, dtype, T", "agreement", "run length", "tokens/forward"),
    *("target-only ms/token", "serial (γ)", "vpsd (γ)", "adaptive", "end to end"),
    *("over serial", "over vpsd", "least over the better", "equal"),
)


def load_title(result: Result) -> str:
    """Returns the title of a load measurement."""
    prompts = f"{result['kind']} prompts, {result['dtype']}, T={result['temperature']:g}"
    return f"{prompts}, closed loop on two cores"


def load_rows(result: Result) -> Iterator[list[str]]:
    """Yields a row, as in ``LOAD_COLUMNS``, for each system and number of clients."""
    for line in result["loads"]:
        gaps = line["gap_ms"]
        low, high = line["tokens_per_s_range"]
        spread = f" [{low:.0f}, {high:.0f}]" if line["num_runs"] > 1 else ""
        yield [
            line["system"],
            str(line["num_clients"]),
            f"{line['tokens_per_s']:.0f}{spread}",
            f"{line['answers_per_s']:.1f}",
            f"{line['ttft_ms']['p50']:.0f} / {line['ttft_ms']['p99']:.0f}",
            f"{line['tpot_ms']['p50']:.2f} / {line['tpot_ms']['p99']:.2f}",
            "-" if gaps is None else f"{gaps['p99']:.0f} / {gaps['max']:.0f}",
            number(line["acceptance_rate"], ".3f"),
            f"{line['tokens_per_forward']:.2f}",
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def latency_rows(summary: Iterable[Result]) -> Iterator[list[str]]:
    """Yields a row, as in ``LATENCY_COLUMNS``, for each system."""
    for row in summary:
        yield [
            row["system"],
            interval(row["decode_speedup"]),
            number(row["decode_speedup"]["minimum"], ".2f"),
            interval(row["end_to_end_speedup"]),
            f"{row['decode_ms_per_token']:.2f}",
            f"{row['ttft_ms']:.0f}",
            number(row["mean_tokens_per_forward"], ".2f"),
            number(row["mean_run_length"], ".1f"),
            number(row["acceptance_rate"], ".3f"),
            number(row["target_wait_ms"], ".0f"),
            number(row["dropped_tokens"], ".0f"),
            number(row["transport_ms_per_round"], ".2f"),
            f"{number(row['target_step_ms'], '.2f')} / {number(row['draft_step_ms'], '.2f')}",
            f"{row['num_equal']}/{row['num_answers']}",
        ]


def level_rows(result: Result) -> Iterator[list[str]]:
    """Yields a row, as in ``LEVEL_COLUMNS``, for each draft and setting."""
    for line in result["levels"]:
        yield [
            line["draft"],
            f"{line['kind']}, {line['dtype']}, {line['temperature']:g}",
            f"{line['agreement']:.1%}",
            f"{line['run_length']:.1f}",
            f"{line['tokens_per_forward']:.2f}",
            f"{line['target_only_ms']:.2f}",
            *(
                f"{line[name]['decode']['mean']:.2f} ({line[name]['gamma']})"
                for name in ("serial", "vpsd")
            ),
            interval(line["adaptive"]["decode"]),
            f"{line['end_to_end']['mean']:.2f}",
            interval(line["over_serial"]),
            interval(line["over_vpsd"]),
            f"{line['least_over_better']:.2f}",
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def percent(value: Mapping[str, float], *, is_signed: bool = False) -> str:
    """Formats a share and half of its interval in percent."""
    half = 50 * (value["high"] - value["low"])
    return f"{100 * value['mean']:{'+.2f' if is_signed else '.2f'}} ±{half:.2f}"
