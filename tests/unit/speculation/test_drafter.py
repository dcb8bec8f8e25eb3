"""What the draft's side feeds, sends and takes back."""

from collections.abc import Sequence
from typing import Any

import pytest

from hippo.errors import InvalidRequestError
from hippo.speculation.branches import Proposal
from hippo.speculation.core import Step
from hippo.speculation.drafter import Drafter
from hippo.speculation.sharpness import Sharpness
from hippo.types import Block, Commit, Pace, StepLimits, Timing

END = 99


def make_pace(*, max_ahead: int = 8, block_size: int = 1, num_first: int = 1) -> Pace:
    return Pace(StepLimits(1, 8), StepLimits(num_first, 8), max_ahead, block_size)


def make_drafter(
    *, pace: Pace | None = None, first_id: int = 10, prompt: Sequence[int] = (), **options: Any
) -> Drafter:
    given: dict[str, Any] = {"max_tokens": 100, "end_token_ids": [END], **options}
    drafter = Drafter(pace=pace or make_pace(), **given)
    drafter.set_prompt_text(prompt)
    drafter.begin(first_id)
    return drafter


def make_guessing(*, max_ahead: int = 40, max_guessed: int = 3, **options: Any) -> Drafter:
    return make_drafter(pace=make_pace(max_ahead=max_ahead), max_guessed=max_guessed, **options)


def start(drafter: Drafter) -> Step:
    step = drafter.next_step()
    assert step is not None
    return step


def draft(drafter: Drafter, *ids: int) -> None:
    for token_id in ids:
        drafter.finish_step(start(drafter), [token_id])


def chose(*choices: int) -> Proposal:
    return Proposal(choices[0], choices=choices)


def take(drafter: Drafter) -> Block:
    [block] = drafter.take_messages()
    return block


PACE_2_3 = make_pace(block_size=3, num_first=2)
LATER = make_pace(max_ahead=2, block_size=4, num_first=4)


@pytest.mark.parametrize(
    ("pace", "events"),
    [
        pytest.param(make_pace(), [Block(0, 0, (10,)), Step(0, (10,))], id="the prefill's token"),
        pytest.param(
            PACE_2_3,
            [None, 11, Block(0, 0, (10, 11)), 12, 13, None, Commit(1, 0, (10, 55)), 56, None, 57,
             Block(1, 2, (56, 57))],
            id="the first block of a run is what the idle target waits for",
        ),
        pytest.param(
            LATER,
            [11, "idle", Block(0, 0, (10, 11), is_exhausted=True), Commit(0, 0, (10,)),
             Step(1, (11,))],
            id="drafting stops at max_ahead and goes on after a commit",
        ),
        pytest.param(
            PACE_2_3,
            [11, Block(0, 0, (10, 11)), 12, 13, 14, Block(0, 2, (12, 13, 14)),
             Commit(0, 0, (10, 51)), 52, None, 53, Block(1, 2, (52, 53))],
            id="a new run is sent from its beginning however far the broken one was sent",
        ),
        pytest.param(
            make_pace(block_size=2, num_first=2),
            [11, Block(0, 0, (10, 11)), 12, Commit(0, 0, (10, 11, 52)), 53, 54,
             Block(0, 3, (53, 54))],
            id="a difference in what was not sent raises no epoch",
        ),
        pytest.param(
            PACE_2_3,
            [11, Block(0, 0, (10, 11)), 12, 13, None, Commit(2, 0, (10, 11)),
             Block(2, 2, (12, 13))],
            id="the target waits for what is sent again as for a first block",
        ),
        pytest.param(
            Pace(),
            ["idle", None, Commit(0, 0, (10, 11)), "idle", make_pace(), Step(0, (10, 11))],
            id="a draft at rest does nothing until the pace changes",
        ),
    ],
)  # fmt: skip
def test_what_is_drafted_and_sent(pace: Pace, events: list[Any]) -> None:
    """Numbers are drafted; commits and paces arrive; a block (None: nothing) is sent; a step
    ("idle": none) follows."""
    drafter = make_drafter(pace=pace)
    for event in events:
        if isinstance(event, int):
            draft(drafter, event)
        elif isinstance(event, Commit | Pace):
            drafter.receive(event)
        elif event == "idle" or isinstance(event, Step):
            assert drafter.next_step() == (None if event == "idle" else event)
        else:
            assert drafter.take_messages() == ([event] if event else [])


def test_a_block_tells_how_long_the_device_waited_since_the_block_before() -> None:
    drafter = make_drafter(pace=make_pace(block_size=2, num_first=3))
    for token_id, wait_ns in ((11, 5), (12, 7)):
        drafter.finish_step(start(drafter), [token_id], Timing(wait_ns=wait_ns))
    assert take(drafter).wait_ns == 5 + 7
    for token_id, wait_ns in ((13, 2), (14, 9)):
        drafter.finish_step(start(drafter), [token_id], Timing(wait_ns=wait_ns))
    assert take(drafter).wait_ns == 2 + 9


def test_a_draft_that_joins_a_long_answer_feeds_it_in_parts() -> None:
    settled = tuple(range(10, 310))
    drafter = make_drafter(max_tokens=400, committed_ids=settled, epoch=4)
    for first, end in ((0, 128), (128, 256)):
        step = start(drafter)
        assert step == Step(first, settled[first:end])
        assert tuple(drafter.history(step)) == settled[:end]
        assert drafter.finish_step(step, [999]) == 0  # the settled id there is another
        assert drafter.take_messages() == []
    drafter.add_commit(Commit(4, 300, (310, 311)))  # the answer goes on meanwhile
    step = start(drafter)
    assert step == Step(256, (*settled[256:], 310, 311))
    assert drafter.finish_step(step, [312]) == 1
    assert take(drafter) == Block(4, 302, (312,))


def test_a_commit_after_a_gap_is_refused() -> None:
    drafter = make_drafter()
    with pytest.raises(InvalidRequestError, match="without a gap"):
        drafter.add_commit(Commit(0, 1, (11,)))


def test_a_guess_is_kept_as_far_as_the_draft_itself_says_the_same() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13, 14])
    step = start(drafter)
    assert (step.token_ids, step.guess, step.first_index) == ((10, 11, 12, 13), (11, 12, 13), 1)
    assert drafter.finish_step(step, [11, 12, 77, 78]) == 3
    assert list(drafter.ids) == [10, 11, 12, 77]
    assert start(drafter).token_ids[0] == 77  # what was fed rightly is not fed again


def test_a_guess_follows_the_settled_tokens_and_not_those_of_the_broken_run() -> None:
    drafter = make_guessing(prompt=[7, 8, 60, 61, 9, 8, 70])
    draft(drafter, 11, 12, 13, 14)
    drafter.add_commit(Commit(1, 0, (10, 11, 50, 7, 8)))
    assert start(drafter).guess == (60, 61, 9)  # after 7 and 8; after the last 8 comes 70


def test_a_block_tells_which_tokens_stood_in_a_guess() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13, 14])
    drafter.finish_step(start(drafter), [11, 12, 77, 78])
    block = take(drafter)
    assert (block.token_ids, block.guessed_places) == ((10, 11, 12, 77), (1, 2))
    drafter.add_commit(Commit(1, 0, (10, 50)))  # the guess of 11 was wrong
    step = start(drafter)
    drafter.finish_step(step, [60] * (step.num_guessed + 1))
    assert take(drafter).guessed_places == ()


def make_broken() -> Drafter:
    """A draft whose run from 10 to 15 was wrong at 11, which should have been 51."""
    drafter = make_guessing(max_guessed=1)
    draft(drafter, 11, 12, 13, 14, 15)
    take(drafter)
    drafter.add_commit(Commit(1, 0, (10, 51)))
    return drafter


def test_what_a_broken_run_said_next_is_tried_first() -> None:
    drafter = make_broken()
    step = start(drafter)
    assert step == Step(1, (51, 12, 13, 14), num_guessed=3)
    assert drafter.finish_step(step, [12, 13, 88, 89]) == 3
    assert take(drafter).token_ids == (12, 13, 88)


def test_a_broken_run_that_does_not_fit_is_not_tried_in_vain() -> None:
    drafter = make_broken()
    assert drafter.finish_step(start(drafter), [88, 89, 90, 91]) == 1
    for last_id, next_id in ((88, 12), (12, 13)):
        step = start(drafter)
        assert step.token_ids == (last_id,)
        assert drafter.finish_step(step, [next_id]) == 1
    assert start(drafter).token_ids == (13, 14, 15)


def test_no_guess_goes_beyond_what_is_to_be_drafted() -> None:
    prompt = [10, 11, 12, 13, 14, 15]
    drafter = make_guessing(prompt=prompt, max_ahead=3)
    step = start(drafter)
    assert step.token_ids == (10, 11)
    assert drafter.finish_step(step, [11, 12]) == 2
    assert drafter.is_exhausted and drafter.next_step() is None
    drafter = make_guessing(prompt=[10, 11, END, 12])
    assert start(drafter).token_ids == (10, 11)


def test_nothing_behind_an_end_token_is_drafted() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    assert drafter.finish_step(start(drafter), [11, END, 13, 14]) == 2
    assert list(drafter.ids) == [10, 11, END]
    assert drafter.next_step() is None


def test_commits_along_a_guess_leave_what_comes_behind_them() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    step = start(drafter)
    drafter.add_commit(Commit(0, 0, (10, 11, 12)))
    assert drafter.finish_step(step, [11, 12, 13, 14]) == 2
    assert list(drafter.ids) == [10, 11, 12, 13, 14]


def test_a_pace_that_stops_the_draft_in_a_step_leaves_it_able_to_go_on() -> None:
    drafter = make_guessing(prompt=[10, 11, 12, 13])
    step = start(drafter)
    drafter.receive(Pace())
    assert drafter.finish_step(step, [11, 12, 13, 14]) == 1
    assert drafter.next_step() is None
    drafter.receive(make_pace())
    assert start(drafter).token_ids[0] == 11


def test_settled_tokens_up_to_the_first_wrong_one_tell_which_sharpness_is_right() -> None:
    sharpness = Sharpness()
    drafter = make_drafter(sharpness=sharpness)
    for token_id in (11, 12, 13, 14):
        drafter.finish_step(start(drafter), [token_id], notes=[chose(token_id, 0, 50 + token_id)])
    # Right twice, then wrong, where the sharpest would be right. Behind that, the draft's choices
    # follow a wrong token and say nothing.
    drafter.add_commit(Commit(1, 0, (10, 11, 12, 63, 64)))
    assert sharpness.place == 0
    drafter.finish_step(start(drafter), [15], notes=[chose(15, 0, 65)])
    drafter.add_commit(Commit(2, 5, (65,)))
    assert sharpness.place == 2
