"""The values of /metrics, each of which has a number of its own here."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hippo.engine.stats import EngineCounters
from hippo.metrics.services import FORWARD_SECONDS
from hippo.service import metrics
from hippo.service.metrics import EngineCollector

MS = 1_000_000


def counted() -> EngineCounters:
    counters = EngineCounters(num_opened=11, num_failed=2)
    for num_rows, num_reused in ((40, 0), (50, 20), (60, 30), (70, 0), (80, 1)):
        counters.count_prefill(num_rows, num_reused)
    counters.count_forward(7 * MS, num_rows=5, num_sequences=2)
    counters.count_forward(12 * MS, num_rows=8, num_sequences=3)
    counters.prefill_ns, counters.idle_ns = 500 * MS, 40 * MS
    return counters


def scraped(counters: EngineCounters) -> dict[str, float]:
    """All samples by name; those of buckets by name and upper bound."""
    info = SimpleNamespace(name="m", family="f", device="cpu", dtype="float32")
    backend = SimpleNamespace(
        info=info,
        slots=SimpleNamespace(num_slots=8, num_used=3, num_waiting=4, max_waiting=64),
        engine=SimpleNamespace(
            counters=counters,
            vision_cache=SimpleNamespace(num_bytes=101, max_bytes=202, num_hits=5, num_misses=6),
        ),
        prompts=SimpleNamespace(
            media_cache=SimpleNamespace(num_bytes=303, max_bytes=404, num_hits=7, num_misses=9)
        ),
    )
    service: Any = SimpleNamespace(backend=backend, num_streams=10)
    return {
        f"{sample.name}{sample.labels.get('le', '')}": sample.value
        for family in EngineCollector(service).collect()
        for sample in family.samples
    }


def test_every_value_is_that_which_its_name_says() -> None:
    found = scraped(counted())
    expected = {
        "slots": 8,
        "slots_used": 3,
        "queue_length": 4,
        "queue_capacity": 64,
        "streams": 10,
        "vision_cache_used_bytes": 101,
        "vision_cache_capacity_bytes": 202,
        "vision_cache_hits_total": 5,
        "vision_cache_misses_total": 6,
        "media_cache_used_bytes": 303,
        "media_cache_capacity_bytes": 404,
        "media_cache_hits_total": 7,
        "media_cache_misses_total": 9,
        "sequences_total": 11,
        "sequence_failures_total": 2,
        "prefills_total": 5,
        "prefix_cache_hits_total": 3,
        "prefix_cache_misses_total": 2,
        "prefill_tokens_total": 300,
        "prefill_cached_tokens_total": 51,
        "rows_total": 13,
        "forward_sequences_total": 5,
        "device_prefill_seconds_total": 0.5,
        "device_busy_seconds_total": 0.519,
        "device_idle_seconds_total": 0.04,
        "forward_seconds_sum": 0.019,
        "forward_seconds_count": 2,
        "model_info": 1,
    }
    assert {name: found[f"hippo_{name}"] for name in expected} == pytest.approx(expected)


def test_a_forward_counts_in_the_first_bucket_that_it_does_not_exceed() -> None:
    counters = EngineCounters()
    bounds = [round(bound * 1e9) for bound in FORWARD_SECONDS]
    for bound in bounds:
        counters.count_forward(bound, 1, 1)  # the bound itself belongs to the bucket
    counters.count_forward(bounds[-1] + 1, 1, 1)
    assert counters.forward_counts == [1] * (len(bounds) + 1)
    found = scraped(counters)
    for number, seconds in enumerate(FORWARD_SECONDS):
        assert found[f"hippo_forward_seconds_bucket{seconds}"] == number + 1, "and all before it"
    assert found["hippo_forward_seconds_bucket+Inf"] == len(bounds) + 1


def test_no_value_is_told_while_the_model_loads() -> None:
    service: Any = SimpleNamespace(backend=None)
    assert list(EngineCollector(service).collect()) == []


@pytest.mark.parametrize(("limit", "share"), [(None, 1.0), (1 << 20, None), (1 << 60, 1.0)])
def test_a_cpus_memory_is_that_of_the_process_within_its_control_group(
    limit: int | None, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "cgroup_value", lambda name: limit)
    used, total = metrics._device_memory(torch.device("cpu"))
    whole = psutil.virtual_memory().total
    assert total == (limit if share is None else whole)
    assert 0 < used < whole


def test_a_gpus_memory_is_what_all_processes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    assert metrics._device_memory(torch.device("cuda:0")) == (70, 100)
