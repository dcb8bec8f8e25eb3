"""What an answer adds to the metrics."""

from unittest.mock import Mock

import pytest

from gateway.answer import account
from gateway.answer.report import AnswerRecord
from gateway.common.baseline import Baseline, OneRowTimes
from gateway.common.metrics import GatewayMetrics
from hippo.metrics import GATEWAY_METRICS, VLLM_METRICS
from hippo.metrics import gateway as own
from hippo.metrics.gateway import DraftLoss, Waste
from hippo.speculation.coordinator import Coordinator
from hippo.speculation.policies import make_policy
from hippo.types import (
    Block,
    FinishReason,
    PromptInfo,
    Pruning,
    PruningStrategy,
    Selection,
    Timing,
    Verdict,
)
from tests.support.running.services import toy_request
from tests.support.watching.metrics import check_exported

MS = 1_000_000
REQUEST = toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.9))


def _learnt() -> Baseline:
    """A token takes 20 ms."""
    baseline = Baseline()
    baseline.learn_steps({0: OneRowTimes(1, 20 * MS, 100)}, now_ns=1)
    return baseline


def _counted(record: AnswerRecord, baseline: Baseline | None = None) -> dict[str, float]:
    """What an answer of the target, of which so much is known, adds to new metrics."""
    metrics, baseline = _metrics(), baseline or Baseline()
    model = metrics.model("hippo")
    target = Mock(address="target:1", baseline=baseline)
    account.count_completion(record, REQUEST, metrics=metrics, model=model, target=target)
    metrics.set_baseline("target:1", baseline)
    return _values(metrics)


def _metrics() -> GatewayMetrics:
    return GatewayMetrics(max_draft_tokens=4)


def _values(metrics: GatewayMetrics) -> dict[str, float]:
    """Values by name and labels, as in the text."""
    lines = metrics.render("")[0].decode().splitlines()
    parts = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in parts}


def _spoken(record: AnswerRecord) -> None:
    """An answer of eight tokens: two verified and accepted, one rejected with one behind it, one
    right but late, a stale block, and a token that the end cut off."""
    coordinator = Coordinator(make_policy("vpsd", gamma=2, max_draft_tokens=4))
    record.stats = coordinator.stats
    record.target_prompt = record.target_prompt or PromptInfo(b"", 0, 0)
    times = iter(range(100, 1000, 10))

    def block(*ids: int, epoch: int = 0, start: int = 0) -> None:
        now_ns = next(times) * MS
        message = Block(epoch, start, ids, step_ns=MS)
        record.add_block(message, now_ns)
        coordinator.on_block(message, now_ns)

    def verdict(value: Verdict) -> None:
        now_ns = next(times) * MS
        coordinator.on_verdict(value, now_ns)
        record.add_verdict(value, now_ns)
        record.num_completion_tokens += len(value.token_ids)
        record.finish_reason = value.finish_reason

    timing, end = Timing(forward_ns=3 * MS, context_length=100), FinishReason.STOP
    block(1, 2, 3)
    verdict(Verdict(0, 0, (1,), timing=Timing(forward_ns=30 * MS)))  # the draft's 1 was right
    verdict(Verdict(0, 1, (2, 3, 4), 2, 2, timing=timing))
    block(9, 9, start=4)
    verdict(Verdict(1, 4, (5,), 2, 0, is_rejection=True, num_dropped_tokens=2, timing=timing))
    block(9, start=6)  # of the run that has ended
    block(6, 7, 8, epoch=1, start=5)
    verdict(Verdict(1, 5, (6, 7, 0), 2, 2, num_dropped_tokens=1, finish_reason=end, timing=timing))


def test_every_draft_token_that_came_was_accepted_or_wasted_for_a_named_cause() -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0)
    _spoken(record)
    assert account.wasted_tokens(record) == dict.fromkeys(Waste, 1)
    assert len(Waste) + record.stats.num_accepted_tokens == record.stats.num_drafted_tokens == 9


def test_tokens_under_way_when_an_answer_ended_early_were_not_verified() -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0)
    coordinator = Coordinator(make_policy("vpsd", gamma=2, max_draft_tokens=4))
    record.stats = coordinator.stats
    coordinator.on_block(Block(0, 0, (1, 2, 3)), 100 * MS)
    coordinator.on_verdict(Verdict(0, 0, (1,)), 110 * MS)  # the draft's 1 was right
    coordinator.on_block(Block(0, 3, (4, 5)), 120 * MS)
    wasted = {cause: num for cause, num in account.wasted_tokens(record).items() if num}
    assert wasted == {Waste.SETTLED_FIRST: 1, Waste.UNVERIFIED: 4}


def test_an_answer_adds_to_vllms_names_as_vllm_means_them() -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0)
    record.target_prompt = PromptInfo(b"", 50, 10, queue_ns=7 * MS)
    _spoken(record)
    record.target_prefill = Timing(num_rows=18, context_length=32)
    values = _counted(record)
    expected = {
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 32,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 6,
        "spec_decode_num_accepted_tokens_total": 4,
        "prompt_tokens_total": 50,
        "generation_tokens_total": 8,
        "inter_token_latency_seconds_count": 3,
        "time_per_output_token_seconds_count": 3,
        "request_time_per_output_token_seconds_count": 1,
        "request_queue_time_seconds_sum": 0.007,
        "time_to_first_token_seconds_sum": 0.11,
    }
    told = {name: values[f'vllm:{name}{{model_name="hippo"}}'] for name in expected}
    assert told == pytest.approx(expected)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [values[f'{name}{{model_name="hippo",position="{place}"}}'] for place in range(4)]
    assert places == [2, 2, 0, 0]
    assert values['vllm:request_success_total{finished_reason="stop",model_name="hippo"}'] == 1


def test_an_answer_adds_to_the_pairs_own_figures() -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0, draft_losses=[DraftLoss.STALLED])
    record.selection = Selection((1, 2, 3), 10)
    record.draft_prefill = Timing(forward_ns=5 * MS)
    _spoken(record)
    values = _counted(record, _learnt())
    expected = {
        'decode_seconds_total{policy="vpsd"}': 0.06,
        'decode_baseline_seconds_total{policy="vpsd"}': 0.14,
        "request_speedup_ratio_sum": 0.14 / 0.06,
        'baseline_step_seconds{context_tokens_le="256",target="target:1"}': 0.02,
        "run_length_tokens_count": 2,
        "run_length_tokens_sum": 8,
        'first_block_delay_seconds_bucket{le="-0.01"}': 1,  # 10 ms early
        'first_block_delay_seconds_bucket{le="-0.02"}': 0,
        'visual_tokens_total{fate="kept",strategy="holistic"}': 3,
        'visual_tokens_total{fate="pruned",strategy="holistic"}': 7,
        'draft_losses_total{cause="stalled"}': 1,
        "stale_blocks_total": 1,
        'sequence_busy_seconds_total{side="draft"}': 0.014,
        'sequence_busy_seconds_total{side="target"}': 0.039,
    }
    assert {name: values[f"hippo_{name}"] for name in expected} == pytest.approx(expected)


def test_target_only_answers_have_no_runs_and_no_speedup_of_their_own() -> None:
    record = AnswerRecord(policy="off", received_ns=0, is_calibration=True, num_completion_tokens=2)
    coordinator = Coordinator(make_policy("off", gamma=1, max_draft_tokens=1), has_draft=False)
    record.stats = coordinator.stats
    for index in range(2):
        verdict = Verdict(0, index, (5,), timing=Timing(forward_ns=20 * MS, context_length=100))
        coordinator.on_verdict(verdict, 0)
        record.add_verdict(verdict, (index + 1) * 20 * MS, is_alone=True)
    values = _counted(record, _learnt())
    assert values["hippo_calibrations_total"] == 1
    assert values['hippo_baseline_steps_total{target="target:1"}'] == 1
    assert values["hippo_run_length_tokens_count"] == 0
    assert values["hippo_request_speedup_ratio_count"] == 0
    assert values['hippo_decode_baseline_seconds_total{policy="off"}'] == pytest.approx(0.02)


def test_series_begin_at_zero_and_none_is_a_time_stamp() -> None:
    metrics = _metrics()
    metrics.model("hippo")
    metrics.set_baseline("target:1", Baseline())
    values = _values(metrics)
    assert not [name for name in values if "_created" in name]
    for name in (
        'hippo_wasted_draft_tokens_total{cause="stale"}',
        'hippo_completions_total{outcome="error",policy="serial"}',
        'vllm:request_success_total{finished_reason="abort",model_name="hippo"}',
        'hippo_baseline_steps_total{target="target:1"}',
    ):
        assert values[name] == 0
    assert not [name for name in values if name.startswith("hippo_baseline_age")]  # not learnt


def test_what_is_exported_is_what_is_declared() -> None:
    metrics = _metrics()
    metrics.set_baseline("target:1", _learnt())
    metrics.model("hippo")
    metrics[own.SERVICE_UP].labels("draft").set(1)
    metrics[own.SERVICES_READY].labels("draft").set(1)
    metrics.count_request("/health", 200)
    check_exported(metrics.render("")[0].decode(), (*VLLM_METRICS, *GATEWAY_METRICS))
