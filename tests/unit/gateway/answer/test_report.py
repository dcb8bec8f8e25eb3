"""The figures that an answer carries about its own making."""

import pytest

from gateway.answer.report import AnswerRecord, Timeline, client_metrics, figures
from gateway.common.baseline import Baseline
from hippo.types import Block, PromptInfo, Pruning, PruningStrategy, Timing, Verdict
from tests.support.running.services import toy_request

MS = 1_000_000
REQUEST = toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.9))


@pytest.mark.parametrize(("block_ms", "reported"), [(30, -20.0), (65, 15.0), (None, None)])
def test_the_drafts_first_block_is_timed_against_the_end_of_the_targets_prefill(
    block_ms: int | None, reported: float | None
) -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0)
    if block_ms is not None:
        record.add_block(Block(0, 0, (5,)), block_ms * MS)
        record.add_block(Block(0, 1, (6,)), 80 * MS)
    record.add_verdict(Verdict(0, 0, (5,)), 50 * MS)
    record.add_verdict(Verdict(0, 1, (6,)), 90 * MS)
    timings = figures(record, REQUEST, Baseline())["timings_ms"]
    assert timings["first_block_after_first_token"] == reported
    assert timings["time_to_first_token"] == 50.0


def test_the_wait_for_a_slot_is_no_part_of_the_time_that_an_answer_has_one() -> None:
    record = AnswerRecord(policy="vpsd", received_ns=0, opened_ns=100 * MS)
    record.add_prompt("target", PromptInfo(b"", 9, 0, queue_ns=700 * MS), 800 * MS)
    record.add_verdict(Verdict(0, 0, (5,)), 1300 * MS)
    assert record.served_s == 0.5


def test_a_timeline_is_kept_and_reported_only_when_it_is_asked_for() -> None:
    verdict = Verdict(0, 1, (6, 7), timing=Timing(0, 4 * MS, 2 * MS, 3, 100), is_rejection=True)
    records = [AnswerRecord("vpsd", 0), AnswerRecord("vpsd", 0, timeline=Timeline())]
    for record in records:
        record.add_verdict(Verdict(0, 0, (5,)), 50 * MS)
        record.add_block(Block(0, 1, (6, 9), step_ns=MS), 55 * MS)
        record.add_verdict(verdict, 60 * MS)
    without, having = (figures(record, REQUEST, Baseline()) for record in records)
    assert "timeline_ms" not in without
    timeline = having["timeline_ms"]
    ids = {"epoch": 0, "start": 1, "token_ids": [6, 9]}
    block = {"at": 5.0, **ids, "tokens": 2, "step": 1.0, "wait": 0.0}
    assert timeline["blocks"] == [block]
    times = {"at": 10.0, "forward": 4.0, "wait": 2.0, "between": 0.0}
    rest = {"tokens": 2, "rows": 3, "context": 100, "is_rejection": True}
    assert timeline["verdicts"][1] == {**times, **rest}


def test_vllms_clients_find_their_figures_and_they_add_up() -> None:
    record = AnswerRecord(policy="serial", received_ns=10 * MS)
    record.add_verdict(Verdict(0, 0, (5,)), 50 * MS)
    record.add_verdict(Verdict(0, 1, (6, 7, 8)), 70 * MS)
    record.num_completion_tokens = 4
    stats = record.stats
    stats.verified_per_position, stats.accepted_per_position = [43, 43, 43], [4, 3, 3]
    stats.num_draft_tokens, stats.num_accepted_tokens = 129, 10
    metrics = client_metrics(record)
    told = metrics.pop("speculative_decoding")
    assert metrics == {
        "time_to_first_token_ms": 40.0,
        "generation_time_ms": 20.0,
        "queue_time_ms": None,
        "mean_itl_ms": 6.667,
        "tokens_per_second": 150.0,
    }
    assert told["acceptance_histogram"] == [39, 1, 0, 3] and told["num_spec_steps"] == 43
    assert told["mean_acceptance_length"] == pytest.approx(1 + 10 / 43)
    assert told["draft_acceptance_rate"] == pytest.approx(10 / 129)


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_reused_tokens"])
def test_a_draft_is_used_if_a_token_of_it_was_verified(name: str) -> None:
    record = AnswerRecord(policy="adaptive", received_ns=0)
    assert figures(record, REQUEST, Baseline())["draft_used"] is False
    setattr(record.stats, name, 1)
    assert figures(record, REQUEST, Baseline())["draft_used"] is True


def test_an_answer_without_a_draft_has_no_speculative_figures() -> None:
    record = AnswerRecord(policy="off", received_ns=0)
    record.add_verdict(Verdict(0, 0, (5,)), MS)
    record.num_completion_tokens = 1
    metrics = client_metrics(record)
    assert metrics["speculative_decoding"] is None
    assert metrics["tokens_per_second"] is None
