"""A request may turn the draft's guesses off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hippo.engine.slots import SlotPool
from hippo.speculation.policies import vpsd_pace
from hippo.speculation.sharpness import SharpnessByTemperature
from services.draft.room import FeatureRoom
from services.draft.sequence import DraftSequence
from tests.support.running.services import toy_request


@pytest.mark.parametrize("without_guesses", [False, True])
def test_a_draft_guesses_unless_the_request_says_otherwise(without_guesses: bool) -> None:
    request = replace(
        toy_request(max_tokens=60),
        committed_ids=(11, 12, 13, 14, 11, 12, 13),
        pace=vpsd_pace(5),
        without_guesses=without_guesses,
    )
    sequence = DraftSequence(
        request,
        SlotPool(1, max_waiting=0),
        max_guessed=2,
        room=FeatureRoom(),
        sharpnesses=SharpnessByTemperature(),
    )
    sequence.drafter.begin(14)
    step = sequence.drafter.next_step()
    assert step is not None
    assert step.guess == (() if without_guesses else (14, 11))
