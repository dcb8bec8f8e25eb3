"""What target-only decoding would take, and the requests that are run to know it."""

import pytest

from gateway.answer.report import AnswerRecord
from gateway.common.baseline import Baseline, OneRowTimes, context_range
from hippo.types import PromptInfo, Timing, Verdict

MS = 1_000_000


def _baseline(*steps: tuple[int, int], share: float = 0.0) -> Baseline:
    """Learnt from (context length, milliseconds) pairs."""
    baseline = Baseline(share)
    for context, duration_ms in steps:
        sums = OneRowTimes()
        sums.add_step(duration_ms * MS, context)
        baseline.learn_steps({context_range(context): sums}, now_ns=1)
    return baseline


def test_a_step_lies_between_the_nearest_measured_ones_or_is_the_nearest() -> None:
    baseline = _baseline((100, 4), (1100, 8))
    for context, step in ((10, 4), (100, 4), (600, 6), (90_000, 8)):
        assert baseline.step_ns(context) == step * MS


def test_old_steps_are_forgotten_at_last() -> None:
    baseline = _baseline((100, 10))
    baseline.learn_steps({0: OneRowTimes(5000, 10_000 * MS, 500_000)}, now_ns=2)
    assert baseline.step_ns(100) == pytest.approx(2 * MS)


def test_each_range_of_contexts_is_told_by_its_upper_bound() -> None:
    baseline = _baseline((256, 4), (257, 5), (200_000, 9))
    assert baseline.known_steps() == [("256", 0.004), ("512", 0.005), ("+Inf", 0.009)]


def _verdict(index: int, *, num_draft_tokens: int = 0) -> Verdict:
    timing = Timing(forward_ns=3 * MS, context_length=100 + index)
    return Verdict(0, index, (5,), num_draft_tokens=num_draft_tokens, timing=timing)


def test_only_steps_of_a_stretch_without_the_draft_are_learnt_from() -> None:
    record = AnswerRecord(policy="adaptive", received_ns=0)
    times = iter(range(10, 100, 10))
    for index, is_alone, num_draft_tokens in (
        (0, True, 0),
        (1, True, 0),  # learnt from
        (2, False, 0),
        (3, True, 0),  # the draft may still have been at work when it began
        (4, True, 0),  # learnt from
        (5, True, 2),  # tokens that had come before
    ):
        verdict = _verdict(index, num_draft_tokens=num_draft_tokens)
        record.add_verdict(verdict, next(times) * MS, is_alone=is_alone)
    assert record.alone_steps == {0: OneRowTimes(2, 20 * MS, 101 + 104)}
    assert record.intervals_ns == [10 * MS] * 5


def test_an_answer_is_compared_with_the_same_tokens_at_the_same_context() -> None:
    record = AnswerRecord(policy="adaptive", received_ns=0, num_completion_tokens=21)
    record.target_prompt = PromptInfo(b"", num_prompt_tokens=90, num_visual_tokens=0)
    record.add_verdict(_verdict(0), 50 * MS)
    record.add_verdict(_verdict(1), 70 * MS)
    assert record.baseline_ns(Baseline()) is None
    baseline_ns = record.baseline_ns(_baseline((100, 4)))
    assert baseline_ns is not None
    assert baseline_ns / record.decode_ns == pytest.approx(4.0)


def test_calibrations_are_the_first_request_and_then_their_share() -> None:
    calibration = Baseline(0.25)
    assert [calibration.is_due(100) for _ in range(9)] == [True, *[False, False, False, True] * 2]


def test_a_range_of_contexts_of_which_nothing_is_known_gets_one_calibration() -> None:
    calibration = _baseline((100, 4), share=0.01)
    assert calibration.is_due(100)
    calibration.note_context_length(120)  # known
    assert not calibration.is_due(100)
    calibration.note_context_length(5000)
    calibration.note_context_length(6000)
    assert [calibration.is_due(100) for _ in range(3)] == [True, False, False]
    calibration.note_context_length(5000)  # asked for once; from here on the share has to do
    assert not calibration.is_due(100)


def test_a_share_of_zero_calibrates_nothing_and_of_one_all_but_short_answers() -> None:
    never, always = _baseline((100, 4)), _baseline((100, 4), share=1.0)
    assert not any(never.is_due(100) for _ in range(300))
    assert all(always.is_due(100) for _ in range(20))
    assert not always.is_due(8)  # too short an answer
