"""Trees of candidates on recorded answers: lossless, blind for what is not settled, and a chain
where a chain is all there is."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.recorded import Choices, Recording, read_recordings, replay_chain
from hippo.lab.simulation.replay import PolicyChoice
from hippo.lab.simulation.tree_replay import TreeReplay, TreeShape
from hippo.lab.simulation.trees import Calibration, Experience, Node, best_first, choose_nodes
from hippo.speculation.estimates import PairTimes

_END = 999
_FREE = Machine(
    name="free", target=ForwardTime(one_row_ms=10.0), draft=ForwardTime(one_row_ms=1.0),
    target_prefill_ms=20.0,
)  # fmt: skip
_BUSY = dataclasses.replace(
    _FREE, target=ForwardTime(one_row_ms=10.0, row_ms=0.1), leg_ms=0.3, draft_message_ms=0.1,
    target_message_ms=0.05, target_scheduling_ms=0.2,
)  # fmt: skip


def recording(seed: int, agreement: float = 0.8, num_tokens: int = 60) -> Recording:
    """An answer whose token is the draft's first choice at a rate of ``agreement``, or else in two
    of three cases its second or third."""
    rng = random.Random(seed)
    output = (*(rng.randrange(20) for _ in range(num_tokens - 1)), _END)
    top: list[Choices] = []
    for token in output:
        others = rng.sample([each for each in range(20, 40) if each != token], 3)
        place = 0 if rng.random() < agreement else rng.randrange(1, 4)
        ids = [*others[:place], token, *others[place:]][:3]
        top.append(tuple(zip(ids, (0.7, 0.2, 0.05), strict=True)))
    broken = {
        index: tuple(top[index + 1 : index + 4])
        for index, (choices, token) in enumerate(zip(top, output, strict=True))
        if choices[0][0] != token and rng.random() < 0.5
    }
    return Recording(output, tuple(top), broken)


def replay(
    each: Recording, shape: TreeShape, machine: Machine = _BUSY, known: Experience | None = None
) -> TreeReplay:
    found = TreeReplay(each, machine.costs(), shape, known or Experience())
    found.run()
    return found


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_tree_gives_the_answer_and_stays_within_its_nodes(seed: int, takes_turns: bool) -> None:
    rng = random.Random(f"shape {seed}")
    shape = TreeShape(
        most_nodes=rng.choice((1, 3, 8, 64)), most_leaves=rng.choice((1, 2, 8)),
        num_choices=rng.choice((1, 2, 3)), takes_turns=takes_turns,
        has_broken_runs=rng.random() < 0.7, has_guesses=rng.random() < 0.7,
        patience=rng.choice((0.0, 0.5, 1.0)),
    )  # fmt: skip
    answer = recording(seed, agreement=rng.choice((0.0, 0.5, 0.9, 1.0)))
    found = replay(answer, shape, rng.choice((_FREE, _BUSY)))
    assert tuple(found.outcome.output_ids) == answer.output
    assert all(len(tokens) <= shape.most_nodes for *_, tokens in found.forwards)


@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_a_tree_of_one_path_that_takes_turns_is_the_serial_chain(gamma: int) -> None:
    answer = recording(3, agreement=1.0, num_tokens=200)
    sure = dataclasses.replace(answer, top=tuple(((each[0][0], 1.0),) for each in answer.top))
    shape = TreeShape(
        most_nodes=gamma, most_leaves=1, num_choices=1, takes_turns=True, has_guesses=False
    )
    tree = replay(sure, shape, _FREE)
    chain = replay_chain(PolicyChoice("serial", gamma), sure, _FREE, times=PairTimes())
    assert tree.outcome.decode_ns == pytest.approx(chain.decode_ns, rel=0.01)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_nothing_that_is_not_settled_changes_what_is_done(takes_turns: bool) -> None:
    answer = recording(5, num_tokens=80)
    blind = dataclasses.replace(answer, broken={})  # the draft says the same on and off the answer
    end = 40
    other = dataclasses.replace(
        blind, output=(*blind.output[:end], *(each + 100 for each in blind.output[end:-1]), _END)
    )
    shape = TreeShape(most_nodes=16, takes_turns=takes_turns)
    first, second = (replay(each, shape) for each in (blind, other))
    before = [
        [forward for forward in found.forwards if forward[1] <= end] for found in (first, second)
    ]
    assert before[0] == before[1]
    assert 0 < len(before[0]) < len(first.forwards)


def test_siblings_help_where_the_second_choice_is_right() -> None:
    answers = [recording(seed, agreement=0.7) for seed in range(6)]
    chain, tree = (
        sum(replay(each, TreeShape(most_nodes=16, num_choices=num)).outcome.decode_ns
            for each in answers)
        for num in (1, 3)
    )  # fmt: skip
    assert tree < 0.95 * chain


def test_chances_become_what_the_verdicts_say() -> None:
    known = Calibration()
    bucket = known.bucket(0, 0.9)
    assert known.chance(bucket, 0.9) == pytest.approx(0.9)
    for number in range(400):
        known.observe(bucket, number % 2 == 0)
    assert known.chance(bucket, 0.9) == pytest.approx(0.5, abs=0.01)
    assert known.chance(known.bucket(1, 0.9), 0.9) == pytest.approx(0.9)


def test_nodes_come_by_the_chance_of_their_path_and_as_many_as_pay() -> None:
    root = Node(0, 0, None, 1.0)
    first, second = Node(1, 1, root, 0.6), Node(2, 1, root, 0.3)
    root.children = [first, second]
    first.children = [Node(3, 2, first, 0.9), Node(4, 2, first, 0.1)]
    ranked = list(best_first(root))
    assert [node.token for _, node in ranked] == [1, 3, 2, 4]
    assert [reach for reach, _ in ranked] == pytest.approx([0.6, 0.54, 0.3, 0.06])
    assert choose_nodes(ranked, lambda rows: 10.0 + rows, speed=0.2) == 3
    assert choose_nodes(ranked, lambda rows: 10.0 + 9 * rows, speed=0.2) == 0


def test_recordings_are_read_and_say_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    line = {
        "clip": "a", "num_prompt_tokens": 7, "num_draft_prompt_tokens": 5, "output": [1, 2, 9],
        "top": [[[1, 0.9]], [[3, 0.6], [2, 0.3]], [[9, 1.0]]], "broken": {"1": [[[4, 0.5]]]},
    }  # fmt: skip
    path.write_text(json.dumps(line) + "\n")
    (found,) = read_recordings(path)
    assert found.choices_after([1]) == ((3, 0.6), (2, 0.3))
    assert found.choices_after([1, 3]) == ((4, 0.5),)
    assert found.choices_after([1, 2]) == ((9, 1.0),)
    assert found.agreement == pytest.approx(2 / 3)
    assert (found.end_token_ids, found.target([1])) == ((9,), 2)
