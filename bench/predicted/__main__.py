"""What ``hippo simulate`` predicts for GPUs, in docs/performance.md: ``python -m bench.predicted``.

    pairs       the papers' pairs by policy (five minutes)
    published   published speedups beside the predicted ones (one minute)
    scaling     which pair fits on which GPUs, how much video, what speed (three minutes)
    pictures    speedups over agreement, ratio of step times and delay (ten minutes)

Nothing is measured; each part replaces its own tables or pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from bench.base.environment import ROOT
from bench.base.options import parser_of
from bench.pages.metrics_page import between_markers
from bench.predicted import pairs, pictures, published, scaling
from hippo.client.tables import markdown

PAGE = ROOT / "docs/performance.md"
TABLES: dict[str, tuple[Sequence[str], Callable[[], Iterable[Sequence[str]]], int]] = {
    "pairs": (pairs.HEAD, pairs.pair_rows, 2),
    "published": (published.HEAD, published.published_rows, 2),
    "scaling": (scaling.HEAD, scaling.scaling_rows, 3),
}
"""By part: the head, the rows, and the number of columns with names."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the parts that are named, by default all."""
    parts = (*TABLES, "pictures")
    parser = parser_of("bench.predicted", __doc__)
    parser.add_argument("part", nargs="*", help="by default all")
    console = Console()
    chosen = parser.parse_args(argv).part or parts
    if unknown := [part for part in chosen if part not in parts]:
        parser.error(f"{unknown[0]} is none of {', '.join(parts)}")
    for part in chosen:
        if part == "pictures":
            pictures.write_pictures(console)
            continue
        head, rows, num_names = TABLES[part]
        table = markdown(head, list(rows()), num_names=num_names) + "\n"
        page = between_markers(PAGE.read_text(encoding="utf-8"), part, table)
        PAGE.write_text(page, encoding="utf-8")
        console.print(f"{part} written to {PAGE}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
