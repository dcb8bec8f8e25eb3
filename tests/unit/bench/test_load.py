"""The lines of the table of loads."""

from __future__ import annotations

from bench.base.cells import LOAD_COLUMNS, cells
from bench.load import typical_lines
from hippo.lab.benchmark.load import LoadRun
from hippo.lab.benchmark.load_figures import summarise_load
from tests.unit.client.test_figures import ended


def test_the_table_has_a_line_a_load() -> None:
    run = LoadRun(num_warm=1)
    run.ended += [ended(0, 1), ended(0, 2)]
    line = {"num_clients": 1, **summarise_load(run, {0: ()})}
    lines = [{"system": system, **line} for system in ("adaptive", "target-only", "adaptive")]
    rows = list(cells(LOAD_COLUMNS, typical_lines(lines)))
    assert [row[0] for row in rows] == ["adaptive", "target-only"]


def test_the_typical_run_of_a_load_is_that_of_median_throughput() -> None:
    speeds = (("a", 1, 5.0), ("a", 1, 9.0), ("a", 1, 7.0), ("a", 2, 1.0))
    lines = [
        {
            "system": system,
            "num_clients": count,
            "tokens_per_s": speed,
            "num_equal": 2,
            "num_answers": 3,
        }
        for system, count, speed in speeds
    ]
    first, second = typical_lines(lines)
    assert (first["tokens_per_s"], first["tokens_per_s_range"]) == (7.0, [5.0, 9.0])
    assert (first["num_equal"], first["num_answers"], first["num_runs"]) == (6, 9, 3)
    assert second["tokens_per_s"] == 1.0
