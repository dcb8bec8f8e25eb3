"""What services did during a load, from their counters, and the lines of the table."""

from __future__ import annotations

import pytest

from bench.base.cells import load_rows
from bench.load.figures import (
    Reading,
    parse_samples,
    service_figures,
    typical_lines,
)
from hippo.lab.benchmark.load import LoadRun
from hippo.lab.benchmark.load_figures import summarise_load
from tests.unit.client.test_figures import ended


def test_samples_with_labels_and_comments_are_passed_over() -> None:
    text = '# HELP a_total x\na_total 3.0\nb_bucket{le="1"} 4\nb_sum 0.5\n'
    assert parse_samples(text) == {"a_total": 3.0, "b_sum": 0.5}


def reading(at_s: float, factor: float) -> Reading:
    samples = {
        "hippo_forward_seconds_count": 10 * factor,
        "hippo_forward_seconds_sum": 0.1 * factor,
        "hippo_rows_total": 70 * factor,
        "hippo_forward_sequences_total": 40 * factor,
        "hippo_device_busy_seconds_total": 0.5 * factor,
        "hippo_device_prefill_seconds_total": 0.25 * factor,
    }
    names = ("target", "draft", "gateway", "clients")
    cpu_s = dict.fromkeys(names, 0.5 * factor)
    return Reading(at_s, {"target": samples, "draft": {}}, cpu_s)


def test_what_the_services_did_is_the_rise_of_their_counters() -> None:
    figures = service_figures(reading(0, 1), reading(2, 3))
    target, draft = figures["target"], figures["draft"]
    assert target["rows_per_forward"] == 7
    assert target["sequences_per_forward"] == 4
    assert target["forward_ms"] == pytest.approx(10)
    assert (target["busy"], target["prefill"]) == (0.5, 0.25)
    assert figures["cpu"]["gateway"] == 0.5
    assert draft["rows_per_forward"] is None


def test_the_table_has_a_line_a_load() -> None:
    run = LoadRun(num_warm=1)
    run.ended += [ended(0, 1), ended(0, 2)]
    services = service_figures(reading(0, 1), reading(2, 3))
    line = {"num_clients": 1, **summarise_load(run, {0: ()}), "services": services}
    lines = [{"system": system, **line} for system in ("adaptive", "target-only", "adaptive")]
    assert len(list(load_rows({"loads": typical_lines(lines)}))) == 2


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
