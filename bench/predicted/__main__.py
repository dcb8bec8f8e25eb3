"""What ``hippo simulate`` predicts for GPUs, in docs/performance.md: ``python -m bench.predicted``.

    pairs       the papers' pairs by policy (five minutes)
    published   published speedups beside the predicted ones (one minute)
    helper      first tokens with the prefill helper (two minutes)
    scaling     which pair fits on which GPUs, how much video, what speed (three minutes)

Nothing is measured; each part replaces its own table.
"""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from bench.base.environment import ROOT
from bench.base.options import parser_of
from bench.pages.markers import rewrite
from bench.predicted import pairs, published, scaling
from hippo.client.tables import markdown

PAGE = ROOT / "docs/performance.md"
TABLES: dict[str, tuple[Sequence[str], Callable[[], Iterable[Sequence[str]]], int]] = {
    "pairs": (pairs.HEAD, pairs.pair_rows, 2),
    "published": (published.HEAD, published.published_rows, 2),
    "helper": (pairs.HELPER_HEAD, pairs.helper_rows, 3),
    "scaling": (scaling.HEAD, scaling.scaling_rows, 3),
}
"""By part: the head, the rows, and the number of columns with names."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the parts that are named, by default all."""
    parser = parser_of("bench.predicted", __doc__)
    parser.add_argument("part", nargs="*", help="by default all")
    chosen = parser.parse_args(argv).part or TABLES
    if unknown := [part for part in chosen if part not in TABLES]:
        parser.error(f"{unknown[0]} is none of {', '.join(TABLES)}")
    for part in chosen:
        head, rows, num_names = TABLES[part]
        rewrite(PAGE, part, markdown(head, list(rows()), num_names=num_names))
        Console().print(f"{part} written to {PAGE}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
