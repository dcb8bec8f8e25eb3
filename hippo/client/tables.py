"""Tables of figures, and progress bars for the terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Row = Mapping[str, Any]
Item = TypeVar("Item")


def progress_bar(console: Console) -> Progress:
    """Returns a progress bar with the remaining time; it disappears at the end.

    It refreshes seldom, because the client may share a core with the server that it measures.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
    )


def tracked(items: Iterable[Item], console: Console, *, title: str, total: int) -> Iterator[Item]:
    with progress_bar(console) as progress:
        yield from progress.track(items, total=total, description=title)


def watched(items: Iterable[Item], console: Console, *, title: str, total: int) -> list[Item]:
    """Returns all items as a list, and counts them in a progress bar."""
    return list(tracked(items, console, title=title, total=total))


def latency_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ["system", "decode ×", "end to end ×", "ms/\ntoken", "TTFT\nms", "tokens/\nforward"]
    table = _table(title, [*columns, "accept", "equal"])
    for row in rows:
        speedups = [interval(row[key]) for key in ("decode_speedup", "end_to_end_speedup")]
        table.add_row(
            row["system"],
            *(each.replace(" ", "\n", 1) for each in speedups),
            _milliseconds(row["decode_ms_per_token"]),
            f"{row['ttft_ms']:.0f}",
            number(row["mean_tokens_per_forward"], ".2f"),
            number(row["acceptance_rate"], ".3f"),
            f"{row['num_equal']}/{row['num_answers']}",
        )
    return table


def alone_table(title: str, row: Row) -> Table:
    """Returns a table of one row of ``figures.summarise_alone``."""
    table = _table(title, ["", "mean", "95 % interval", "least", "most"])
    for name, key, form in (
        ("time to first token, ms", "ttft_ms", ".1f"),
        ("ms a token after it", "ms_per_token", ".2f"),
        ("end to end, ms", "end_to_end_ms", ".0f"),
        ("tokens a second, end to end", "tokens_per_s", ".1f"),
    ):
        found = row[key]
        mean, low, high, least, most = (
            format(found[each], form) for each in ("mean", "low", "high", "minimum", "maximum")
        )
        table.add_row(name, mean, f"{low} to {high}", least, most)
    return table


def load_table(title: str, lines: Sequence[Row]) -> Table:
    """Returns a table of rows of ``summarise_load`` with ``system`` and ``num_clients``."""
    columns = ["system", "clients", "tokens\n/s"]
    columns += ["TTFT\nms\np50\np99", "ms/\ntoken\np50\np99", "gap\nms\np50\np99"]
    has_draft = any(line["acceptance_rate"] is not None for line in lines)
    has_equality = any(line["num_equal"] is not None for line in lines)
    columns += ["accept"] if has_draft else []
    columns += ["equal"] if has_equality else []
    table = _table(title, [*columns, "errors"])
    for line in lines:
        table.add_row(
            line["system"],
            str(line["num_clients"]),
            f"{line['tokens_per_s']:.0f}",
            _stacked(line["ttft_ms"]),
            _stacked(line["tpot_ms"]),
            "-" if line["gap_ms"] is None else _stacked(line["gap_ms"]),
            *([number(line["acceptance_rate"], ".3f")] if has_draft else []),
            *([f"{line['num_equal']}/{line['num_answers']}"] if has_equality else []),
            str(line["num_errors"]),
        )
    return table


def questions_table(title: str, table: Sequence[Sequence[str]]) -> Table:
    """Returns a table of a head and rows, as ``question_figures.table_of`` has them, that fits into
    a terminal: without intervals and counts of right answers, and with each category on a line
    above its systems."""
    (_, system, *head), *rows = table
    found = _table(title, [system, *(name.replace("/", "/\n").replace(" ", "\n") for name in head)])
    shown = ""
    for category, system, *cells in rows:
        if category != shown:
            found.add_row(category)
            shown = category
        means = (cell.partition(" [")[0].rpartition(" ")[2] for cell in cells)
        found.add_row(f"  {system}", *means)
    return found


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], *, num_names: int = 1) -> str:
    """Returns a Markdown table whose first ``num_names`` columns are aligned to the left."""
    rule = ["---"] * num_names + ["---:"] * (len(head) - num_names)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *rows))


def interval(value: Mapping[str, float]) -> str:
    """Formats a ``figures.spread`` as ``mean [low, high]``."""
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def number(value: float | None, form: str) -> str:
    """Formats a number; None is a dash."""
    return "-" if value is None else format(value, form)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        is_name = name in ("", "system")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=True)
    return table


def _stacked(values: Mapping[str, float]) -> str:
    return f"{_milliseconds(values['p50'])}\n{_milliseconds(values['p99'])}"


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
