"""Which failure it is: the doctor's judgement of figures."""

import re

import pytest

from hippo.cli.doctor import Readings, Severity, diagnose, parse_scrape

HEALTHY = {
    'hippo_service_up{service="target"}': 1,
    'hippo_service_up{service="draft"}': 1,
    'hippo_baseline_step_seconds{context_tokens_le="256",target="t:1"}': 0.005,
    'hippo_decode_seconds_total{policy="adaptive"}': 10,
    'hippo_decode_baseline_seconds_total{policy="adaptive"}': 60,
    'hippo_decode_seconds_total{policy="off"}': 10,
    'hippo_decode_baseline_seconds_total{policy="off"}': 10,
    "vllm:spec_decode_num_draft_tokens_total": 1000,
    "vllm:spec_decode_num_accepted_tokens_total": 950,
    "vllm:request_decode_time_seconds_sum": 20,
    'vllm:request_success_total{finished_reason="stop"}': 100,
    'vllm:request_success_total{finished_reason="error"}': 0,
    "hippo_run_length_tokens_sum": 900,
    "hippo_run_length_tokens_count": 10,
    "hippo_blocks_total": 400,
    "hippo_stale_blocks_total": 4,
    "hippo_target_forwards_total": 1000,
    "hippo_round_transport_seconds_sum": 0.0003,
    "hippo_round_transport_seconds_count": 1,
    'hippo_sequence_wait_seconds_total{side="target"}': 1,
    'hippo_sequence_wait_seconds_total{side="draft"}': 5,
    'hippo_draft_losses_total{cause="unavailable"}': 0,
    'hippo_http_requests_total{path="/v1/chat/completions",status="429"}': 0,
}


def _readings(**changes: float) -> Readings:
    """Healthy ones but for these, each named by a part of its series."""
    values = dict(HEALTHY)
    for part, value in changes.items():
        (name,) = [name for name in values if part in name.replace('"', "").replace("=", "_")]
        values[name] = value
    return parse_scrape("".join(f"{name} {value}\n" for name, value in values.items()))


def _problems(readings: Readings) -> list[str]:
    problems = [each for each in diagnose(readings) if each.severity is Severity.PROBLEM]
    return [f"{each.text}; {each.advice}" for each in problems]


def test_a_healthy_pair_is_told_its_speedup_and_no_problem() -> None:
    findings = diagnose(_readings())
    assert {finding.severity for finding in findings} == {Severity.GOOD}
    texts = [finding.text for finding in findings]
    assert "decoding is 6.00 times as fast as the target alone" in texts
    assert "95% of the draft's tokens are accepted, mean run length 90.0" in texts


SLOW = {"baseline_seconds_total{policy_adaptive": 14}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"service_up{service_target": 0}, "the target does not serve"),
        ({"service_up{service_draft": 0}, "the draft does not serve or does not fit"),
        (
            {"baseline_seconds_total{policy_adaptive": 8, "num_accepted_tokens": 500},
            "0.80 times as fast",
        ),
        ({"run_length_tokens_sum": 35}, "draft and target are badly aligned"),
        ({"num_accepted_tokens": 200}, "acceptance has collapsed"),
        ({"stale_blocks": 200}, "50% of the draft's blocks come too late"),
        ({"draft_losses": 30}, r"answers went on without their draft \(unavailable 30;"),
        ({"finished_reason_error": 30}, "30 of 130 requests failed"),
        (
            {"finished_reason_error": 30, "status_429": 30},
            "30 of them refused because slots and queue were full; raise --slots or --max-queue",
        ),
        (
            {**SLOW, "wait_seconds_total{side_target": 9},
            r"scheduling or transport eats the gain.* the target waits for the draft \(45%",
        ),
        (
            {**SLOW, "round_transport_seconds_sum": 0.011},
            r"scheduling or transport eats the gain.* transport between the services \(55%",
        ),
    ],
)
def test_each_failure_is_told_by_its_name_and_alone(changes: dict[str, float], told: str) -> None:
    (problem,) = _problems(_readings(**changes))
    assert re.search(told, problem)


def test_too_little_traffic_is_no_judgement_and_what_is_missing_is_told() -> None:
    with pytest.raises(ValueError, match="not a gateway's"):
        parse_scrape("hippo_slots 4\n")
    text = 'hippo_service_up{service="target"} 1\n'
    (problem,) = _problems(parse_scrape(text))
    assert problem.startswith("no draft is configured: every answer is target-only")
    findings = diagnose(parse_scrape(text + 'hippo_service_up{service="draft"} 1\n'))
    unknown = [Severity.UNKNOWN] * 2
    assert [finding.severity for finding in findings] == [Severity.GOOD, *unknown]
    assert "no target-only step was measured yet" in findings[1].text


def test_a_stretch_of_time_is_judged_by_what_has_grown_in_it() -> None:
    before, after = _readings(), _readings()
    assert diagnose(after.since(before))[1].severity is Severity.UNKNOWN
    later = Readings({key: 2 * value for key, value in before.values.items()})
    assert _problems(later.since(before)) == []
    assert later.since(before).total("vllm:spec_decode_num_draft_tokens_total") == 1000
