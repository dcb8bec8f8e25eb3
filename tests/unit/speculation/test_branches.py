"""What draft and target do with branches: what follows if the draft's second choice is right."""

import random
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.lab.simulation.devices import Costs, KeyCache
from hippo.lab.simulation.simulator import Simulation
from hippo.speculation.branches import Branches, Proposal
from hippo.speculation.core import Step
from hippo.speculation.drafter import Drafter
from hippo.speculation.policies import FixedPolicy
from hippo.types import Branch, Commit, Pace, StepLimits
from tests.unit.speculation.test_drafter import END, start, take

PACE = Pace(StepLimits(1, 8, 1000), StepLimits(1, 8, 1000), 3, 2, max_reused=4, max_branched=4)


def a_drafter(*, max_guessed: int = 0, max_tokens: int = 100) -> Drafter:
    """A draft that said 10, 11 and 12, and whose second choices were 20, 21 and 22."""
    drafter = Drafter(
        max_tokens=max_tokens, end_token_ids=[END], pace=PACE, max_guessed=max_guessed
    )
    drafter.begin(10, notes=[Proposal(10, 20, 0.1)])
    say(drafter, Proposal(11, 21, 0.4))
    say(drafter, Proposal(12, 22, 0.2))
    return drafter


def say(drafter: Drafter, *proposals: Proposal) -> Step:
    step = start(drafter)
    ids = [proposal.token_id for proposal in proposals]
    drafter.finish_step(step, ids, notes=proposals)
    return step


def test_an_exhausted_draft_extends_the_likeliest_branch_and_sends_it() -> None:
    drafter = a_drafter()
    assert take(drafter).token_ids == (10, 11, 12)
    step = say(drafter, Proposal(31))
    assert (step.start_index, step.token_ids) == (1, (21,))
    assert drafter.history(step) == [10, 21]
    assert drafter.take_messages() == []
    step = say(drafter, Proposal(32))  # the branch stays the likeliest one
    assert (step.start_index, step.token_ids) == (2, (31,))
    block = take(drafter)
    assert (block.start_index, block.token_ids, block.is_exhausted) == (3, (), True)
    assert block.branches == (Branch(1, (21, 31, 32)),)


def test_less_likely_branches_follow_until_enough_is_drafted() -> None:
    drafter = a_drafter()
    say(drafter, Proposal(31, 41, 0.5))
    step = say(drafter, Proposal(32, 42, 0.5))  # 0.9 * 0.4 * 0.5 is still more than 0.9 * 0.6 * 0.2
    assert step.token_ids == (31,)
    step = say(drafter, Proposal(33))
    assert (step.start_index, step.token_ids) == (1, (11, 22))
    say(drafter, Proposal(34))
    assert drafter.next_step() is None
    branches = {branch for block in drafter.take_messages() for branch in block.branches}
    assert branches == {Branch(1, (21, 31, 32)), Branch(2, (22, 33, 34))}


def test_a_step_of_a_branch_guesses_that_the_run_goes_on_as_it_did() -> None:
    drafter = a_drafter(max_guessed=4)
    step = start(drafter)
    assert (step.token_ids, step.num_guessed) == ((21, 12), 1)
    drafter.finish_step(step, [12, 13], notes=[Proposal(12), Proposal(13)])
    assert take(drafter).branches == (Branch(1, (21, 12, 13)),)


def test_the_draft_goes_on_at_the_end_of_the_branch_that_the_target_takes() -> None:
    drafter = a_drafter()
    say(drafter, Proposal(31))
    say(drafter, Proposal(32))
    take(drafter)
    drafter.add_commit(Commit(1, 0, (10, 21)))
    assert (drafter.ids, drafter.epoch) == ([10, 21, 31, 32], 1)
    block = take(drafter)
    assert (block.start_index, block.token_ids, block.is_from_branch) == (2, (31, 32), True)
    step = say(drafter, Proposal(33))
    assert (step.start_index, step.token_ids) == (3, (32,))  # its rows are in the cache
    assert not take(drafter).is_from_branch


def test_a_step_about_a_branch_is_used_if_its_commit_comes_meanwhile() -> None:
    drafter = a_drafter()
    say(drafter, Proposal(31))
    step = start(drafter)
    drafter.add_commit(Commit(1, 0, (10, 21)))
    assert drafter.finish_step(step, [32], notes=[Proposal(32)]) == 1
    assert drafter.ids == [10, 21, 31, 32]
    step = start(drafter)
    drafter.add_commit(Commit(2, 2, (51,)))
    assert drafter.finish_step(step, [33], notes=[Proposal(33)]) == 0


def test_a_branch_ends_with_an_end_token_and_before_the_targets_last_token() -> None:
    drafter = a_drafter()
    say(drafter, Proposal(END))
    assert start(drafter).token_ids == (11, 22)
    drafter = a_drafter(max_tokens=4)
    take(drafter)
    say(drafter, Proposal(31))
    assert drafter.next_step() is None
    assert take(drafter).branches == (Branch(1, (21, 31)),)  # nothing follows to wait for


def test_branches_that_the_target_dropped_are_sent_again_with_the_run() -> None:
    drafter = a_drafter()
    say(drafter, Proposal(31))
    say(drafter, Proposal(32))
    assert take(drafter).branches == (Branch(1, (21, 31, 32)),)
    drafter.add_commit(Commit(2, 0, (10,)))
    block = take(drafter)
    assert (block.epoch, block.start_index, block.token_ids) == (2, 1, (11, 12))
    assert block.branches == (Branch(1, (21, 31, 32)),)


def a_spent_drafter() -> Drafter:
    """A draft that has drafted all that it may in branches."""
    drafter = a_drafter()
    for token_id in (31, 32, 33, 34):
        say(drafter, Proposal(token_id))
    assert drafter.next_step() is None
    return drafter


def test_branches_of_settled_tokens_leave_room_for_others() -> None:
    drafter = a_spent_drafter()
    drafter.add_commit(Commit(0, 0, (10, 11, 12)))
    for token_id in (13, 14, 15):
        say(drafter, Proposal(token_id, token_id + 10, 0.3))
    step = say(drafter, Proposal(90))
    assert (step.start_index, step.token_ids) == (3, (23,))


def test_a_new_run_has_branches_of_its_own() -> None:
    drafter = a_spent_drafter()
    drafter.add_commit(Commit(1, 0, (10, 50)))
    say(drafter, Proposal(60, 61, 0.4))
    say(drafter, Proposal(70, 71, 0.1))
    say(drafter, Proposal(80, 81, 0.1))
    take(drafter)
    step = say(drafter, Proposal(90))
    assert (step.start_index, step.token_ids) == (2, (61,))
    assert drafter.history(step) == [10, 50, 61]


def test_an_improbable_branch_is_not_drafted() -> None:
    branches = Branches([END])
    assert branches.likeliest({0: Proposal(1, 2, 0.05), 1: Proposal(3, 4, 0.05)}, end=9) is None
    found = branches.likeliest({0: Proposal(1, 2, 0.15), 1: Proposal(3, 4, 0.3)}, end=9)
    assert found is not None and found.ids == [4]


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_only_what_the_draft_itself_says_is_drafted_in_runs_and_branches(
    data: st.DataObject, seed: int
) -> None:
    """Commits of any length, right or wrong, come before and during steps, and the pace changes."""
    rng = random.Random(seed)

    def says(history: Sequence[int]) -> Proposal:
        own = random.Random(repr((seed, *history[-3:])))
        first, second = own.sample(range(4), 2)
        return Proposal(first, second, own.random() / 2)

    def a_pace() -> Pace:
        return Pace(
            StepLimits(1, 8),
            StepLimits(1, 8),
            max_ahead=rng.randint(1, 12),
            block_size=rng.randint(1, 4),
            max_branched=rng.randint(0, 12),
        )

    settled = [rng.randrange(3) for _ in range(data.draw(st.sampled_from((0, 0, 9, 40, 180))))]
    max_tokens = len(settled) + 60
    drafter = Drafter(max_tokens=max_tokens, end_token_ids=[3] if seed % 2 else [], pace=a_pace(),
                      committed_ids=settled, max_guessed=data.draw(st.integers(0, 4)))  # fmt: skip
    drafter.set_prompt_text([rng.randrange(4) for _ in range(seed % 7)])
    drafter.begin(says([]).token_id, notes=[says([])])
    keys = KeyCache()
    for _ in range(60):
        if rng.random() < 0.1:
            drafter.receive(a_pace())
        step = drafter.next_step()
        if rng.random() < 0.3 and len(settled) < max_tokens - 10:
            added = list(drafter.ids)[len(settled) : len(settled) + rng.randrange(1, 4)]
            added = added or [rng.randrange(4)]
            if rng.random() < 0.6:
                wrong = says([*settled, *added[:-1]])
                added[-1] = wrong.second_id if rng.random() < 0.7 else rng.randrange(4)
            drafter.add_commit(Commit(drafter.epoch, len(settled), tuple(added)))
            settled += added
        if step is not None:
            history = keys.feed(step)
            assert history == list(drafter.history(step))
            rows = [says(history + list(step.guess[:row])) for row in range(step.num_guessed + 1)]
            drafter.finish_step(step, [row.token_id for row in rows], notes=rows)
        assert list(keys.ids)[: len(drafter.fed_ids)] == list(drafter.fed_ids)
        ids = list(drafter.ids)
        for index in range(len(settled), len(ids)):
            assert ids[index] == says(ids[:index]).token_id
        for block in drafter.take_messages():
            for branch in block.branches:
                history, (second, *rest) = ids[: branch.index], branch.token_ids
                assert says(history).second_id == second
                for place, token_id in enumerate(rest):
                    assert says([*history, second, *rest[:place]]).token_id == token_id


def decode_ns(second_choice: Callable[[Sequence[int]], tuple[int, float]]) -> float:
    """Returns the time of an answer whose draft is wrong at every fourth token."""
    limits = StepLimits(1, 8, 10**9)
    return Simulation(
        target=len,
        draft=lambda history: len(history) if len(history) % 4 else -1,
        policy=FixedPolicy(Pace(limits, limits, 8, 4, max_branched=8)),
        costs=Costs(
            target_ns=lambda num_rows, context: 20e6,
            draft_ns=lambda num_rows, context: 1e6,
        ),
        max_tokens=200,
        second_choice=second_choice,
    ).run().decode_ns  # fmt: skip


def test_right_second_choices_save_the_wait_for_the_draft() -> None:
    without = decode_ns(lambda history: (0, 0.0))
    right = decode_ns(lambda history: (len(history), 0.0 if len(history) % 4 else 0.4))
    wrong = decode_ns(lambda history: (-2, 0.0 if len(history) % 4 else 0.4))
    assert right < 0.95 * without
    assert wrong < 1.03 * without
