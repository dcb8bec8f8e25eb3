"""Traces, and replays against closed forms and what must hold of any prediction."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from hippo.errors import InvalidRequestError
from hippo.lab.simulation.devices import Outcome
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import PolicyChoice, compare, parse_policies, replay, replay_all
from hippo.lab.simulation.traces import (
    Trace,
    agreement_of_run_length,
    drawn_traces,
    mean_agreement,
    read_traces,
)
from hippo.speculation.policies import MAX_DRAFT_TOKENS


def test_traces_are_read_plain_and_as_json_and_short_ones_left_out(tmp_path: Path) -> None:
    lines = ["1101", "1", "", json.dumps({"agrees": "10", "clip": "a", "num_prompt_tokens": 7})]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(lines))
    plain, rich = read_traces(path, num_prompt_tokens=5)
    assert plain.agrees == (True, True, False, True)
    assert plain.num_prompt_tokens == plain.num_draft_prompt_tokens == 5
    assert (rich.name, rich.num_prompt_tokens, rich.num_draft_prompt_tokens) == ("a", 7, 7)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("11x", "line 1"),
        ('{"agrees": 5}', "line 1"),
        ("{", "no JSON"),
        ('{"agrees": "11", "num_prompt_tokens": null}', "line 1: numbers of prompt tokens"),
        ("1\n", "two tokens"),
        ("\xff\n", "no text in UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_traces_is_refused_with_its_line(
    tmp_path: Path, text: str | None, part: str
) -> None:
    path = tmp_path / "traces"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequestError, match=part):
        read_traces(path)


def test_drawn_traces_have_the_rate_asked_for_bursty_or_not() -> None:
    for burstiness in (0.0, 0.5, 1.0):
        traces = drawn_traces(
            agreement=0.85, num_traces=20, num_tokens=1000, burstiness=burstiness, seed=1
        )
        assert mean_agreement(traces) == pytest.approx(0.85, abs=0.02)
    assert traces == drawn_traces(
        agreement=0.85, num_traces=20, num_tokens=1000, burstiness=1.0, seed=1
    )


def test_a_run_length_is_one_more_than_the_mean_accepted_tokens_of_its_rate() -> None:
    for accepted in (3.0, 8.05):  # PEARL's and HIPPO's M
        assert agreement_of_run_length(accepted + 1) == pytest.approx(accepted / (accepted + 1))


FREE = Machine(name="free", target=ForwardTime(one_row_ms=10.0), draft=ForwardTime(one_row_ms=1.0))
BUSY = dataclasses.replace(
    FREE, leg_ms=0.3, draft_message_ms=0.1, target_message_ms=0.05, target_scheduling_ms=0.2
)


def always_right(num_tokens: int) -> list[Trace]:
    return [Trace((True,) * num_tokens)]


def test_what_adaptive_measured_in_one_answer_it_knows_in_the_next() -> None:
    quick = dataclasses.replace(FREE, draft=ForwardTime(one_row_ms=0.2))
    traces = always_right(100) * 3
    alone = replay(PolicyChoice("adaptive"), traces[0], quick)
    first, *_, last = replay_all(PolicyChoice("adaptive"), traces, quick).outcomes
    assert first.decode_ns < alone.decode_ns
    assert last.decode_ns <= first.decode_ns


def test_a_broken_run_fits_where_the_trace_says_so() -> None:
    agrees = tuple(place % 6 != 5 for place in range(120))
    wrong = [place for place, is_right in enumerate(agrees) if not is_right]
    free = dataclasses.replace(FREE, draft=ForwardTime(one_row_ms=5.0))  # slow, so reuse pays
    never, always = (
        replay(
            PolicyChoice("adaptive"), Trace(agrees, fits=dict.fromkeys(wrong, does_fit)), free
        ).stats
        for does_fit in (False, True)
    )
    assert never.num_accepted_reused == 0 < always.num_accepted_reused


@pytest.mark.parametrize(("gamma", "rate"), [(1, 0.8), (3, 0.5), (6, 0.8)])
def test_serial_settles_as_many_tokens_a_round_as_independent_agreement_gives(
    gamma: int, rate: float
) -> None:
    traces = drawn_traces(agreement=rate, num_traces=8, num_tokens=400, burstiness=0.0)
    found = replay_all(PolicyChoice("serial", gamma), traces, FREE)
    expected = (1 - rate ** (gamma + 1)) / (1 - rate)  # Leviathan et al., section 3.1
    assert found.mean_tokens_per_forward == pytest.approx(expected, rel=0.03)
    round_ms = 10.0 + gamma * 1.0
    assert found.ms_per_token == pytest.approx(round_ms / expected, rel=0.04)


@pytest.mark.parametrize("ratio", [2.0, 4.0, 20.0])
def test_a_draft_that_is_always_right_is_bound_by_the_slower_side(ratio: float) -> None:
    machine = dataclasses.replace(FREE, draft=ForwardTime(one_row_ms=10.0 / ratio))
    gamma = 8
    [row] = compare([PolicyChoice("vpsd", gamma)], always_right(401), machine)
    # Neither can the draft be outrun, nor can a forward settle more than gamma and its own token.
    bound = min(ratio, gamma + 1)
    assert row.decode_speedup <= bound * 1.01
    [free] = compare([PolicyChoice("optimistic")], always_right(401), machine)
    assert free.decode_speedup == pytest.approx(min(ratio, 33), rel=0.05)


def test_the_ideal_has_the_steps_and_nothing_else() -> None:
    ideal = BUSY.ideal()
    assert (ideal.target, ideal.draft) == (BUSY.target, BUSY.draft)
    rows = compare([PolicyChoice("serial", 4)], always_right(200), BUSY)
    assert rows[0].efficiency < 1
    assert rows[0].ideal.ms_per_token == pytest.approx(14 / 5, rel=0.02)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    machine = dataclasses.replace(BUSY, jitter=0.1)
    trace = drawn_traces(agreement=0.8, num_traces=1, num_tokens=200)[0]

    def decode_ns(seed: int) -> float:
        return replay(PolicyChoice("adaptive"), trace, machine, seed=seed).decode_ns

    assert decode_ns(3) == decode_ns(3)
    assert decode_ns(3) != decode_ns(4)


def test_prefills_count_end_to_end_and_the_draft_waits_for_the_selection() -> None:
    machine = dataclasses.replace(
        FREE, target_prefill_ms=100.0, draft_prefill_ms=20.0, selection_ms=50.0
    )
    outcome = replay(PolicyChoice("serial", 2), always_right(10)[0], machine)
    assert outcome.first_token_ns == pytest.approx(100e6)
    assert outcome.total_ns == pytest.approx(100e6 + outcome.decode_ns)
    late = dataclasses.replace(machine, selection_ms=150.0)
    slower = replay(PolicyChoice("serial", 2), always_right(40)[0], late)
    # The draft's first token stood ready at 70 ms and comes at 170 now: meanwhile the target goes
    # alone, ten milliseconds a token.
    num_alone = [_num_alone(each) for each in (outcome, slower)]
    assert num_alone == [0, 8]
    assert all(verdict.timing.wait_ns == 0 for verdict in slower.verdicts[1:9])


def _num_alone(outcome: Outcome) -> int:
    """Forwards before the first one with draft tokens."""
    verdicts = itertools.takewhile(lambda each: not each.num_draft_tokens, outcome.verdicts[1:])
    return len(list(verdicts))


def test_the_best_block_length_is_searched_for() -> None:
    traces = drawn_traces(agreement=0.6, num_traces=2, num_tokens=60)
    best, short, long = compare(parse_policies("serial:best,serial:1,serial:15"), traces, FREE)
    assert best.policy.gamma
    assert best.totals.decode_ns <= min(short.totals.decode_ns, long.totals.decode_ns)


@pytest.mark.parametrize("name", ["serial", "vpsd"])
def test_the_automatic_block_length_is_the_ratio_of_the_steps(name: str) -> None:
    machine = dataclasses.replace(BUSY, target=ForwardTime(one_row_ms=10.0, row_ms=0.2))
    traces = drawn_traces(agreement=0.8, num_traces=2, num_tokens=100)
    found, same = compare(parse_policies(f"{name}:auto,{name}:10"), traces, machine)
    assert found.policy.title == f"{name} γ=auto"
    assert found.totals.decode_ns == pytest.approx(same.totals.decode_ns, rel=0.01)
    assert [outcome.stats.num_draft_tokens for outcome in found.totals.outcomes] == [
        outcome.stats.num_draft_tokens for outcome in same.totals.outcomes
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fast", "adaptive"),
        ("adaptive:3", "only serial and vpsd"),
        ("serial:0", f"1 to {MAX_DRAFT_TOKENS}"),
        ("serial:²", f"1 to {MAX_DRAFT_TOKENS}"),
        ("serial:many", f"1 to {MAX_DRAFT_TOKENS}, auto or best"),
        ("", "no policy given"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_would_be_right(text: str, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        parse_policies(text)
