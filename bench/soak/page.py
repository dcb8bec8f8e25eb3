"""A soak's figures: a table for the terminal, a section of docs/reliability.md, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.environment import ROOT
from bench.page import environment_line
from bench.sections import replace_section
from hippo.benchmark.plots import draw_memory

PAGE, PICTURE = ROOT / "docs/reliability.md", ROOT / "docs/soak.svg"

Result = Mapping[str, Any]


def rows(result: Result) -> list[tuple[str, str]]:
    """What was done and what came of it, by name."""
    outcomes, troubles = result["outcomes"], Counter(t["kind"] for t in result["troubles"])
    finished = sum(count for name, count in outcomes.items() if name.endswith("equal answer"))
    different = outcomes.get("answered differently", 0)
    lines = [
        ("minutes, clients, slots",
         f"{result['seconds'] / 60:.1f}, {result['num_clients']}, {result['slots']}"),
        ("requests", f"{sum(outcomes.values()):,}"),
        *((name, f"{count:,}") for name, count in outcomes.items()),
        ("finished answers equal to target-only's", f"{finished:,} of {finished + different:,}"),
        ("tokens of them", f"{result['num_tokens']:,}"),
        ("draft killed and started again", f"{troubles['killed']}"),
        ("draft stopped and continued", f"{troubles['stopped']}"),
        ("what should not have been", f"{len(result['faults'])}"),
        *((f"in use at the end: {name}", f"{count:g}") for name, count in result["left"].items()),
        ("all free after the last client", f"{result['idle_after_s']:.2f} s"),
    ]  # fmt: skip
    for name, slope in result["growth_mb_a_minute"].items():
        series = result["memory"][name]
        last = f"{series[-1]['resident_mb']:,.0f} MB at the end"
        grew = "life too short" if slope is None else f"{slope:+.2f} MB a minute"
        lines.append((f"resident memory of the {name}", f"{grew}, {last}"))
    return lines


def table(result: Result) -> Table:
    """The rows for a terminal."""
    shown = Table(title=f"soak, {result['dtype']}", title_justify="left")
    shown.add_column("what", no_wrap=True)
    shown.add_column("figure", justify="right")
    for row in rows(result):
        shown.add_row(*row)
    return shown


def publish(result: Result) -> None:
    """Rewrites the page's section and draws the picture."""
    lines = [
        f"`{result['command']}`: {environment_line(result['environment'])}",
        "",
        "| what | figure |",
        "|---|---:|",
        *(f"| {name} | {figure} |" for name, figure in rows(result)),
    ]
    replace_section(PAGE, "soak", "\n".join(lines))
    draw_memory(result["memory"], result["troubles"], PICTURE, title="Resident memory in the soak")
