"""How a draft learns the weight of the noise in its choices."""

from __future__ import annotations

import math

import pytest
import torch

from hippo.sampling.sampler import SampleRequest, TokenSampler, sample_step
from hippo.speculation.sharpness import SHARPNESSES, Sharpness, SharpnessByTemperature
from hippo.types import SamplingParams

NUM_IDS = 40
PARAMS = SamplingParams(temperature=0.9, top_k=12, seed=7)


def test_the_sharpness_that_was_right_most_often_of_late_is_the_best() -> None:
    sharpness = Sharpness()
    assert SHARPNESSES[sharpness.place] == 1.0
    for _ in range(3):
        sharpness.observe_choices((5, 6, 9), 6)
    assert sharpness.place == 1
    sharpness.observe_choices((8, 8, 8), 8)
    assert sharpness.place == 1
    for _ in range(2000):
        sharpness.observe_choices((1, 2, 3), 3)
    assert sharpness.place == 2


def test_sequences_of_one_temperature_learn_together_and_greedy_ones_do_not() -> None:
    known = SharpnessByTemperature()
    assert known.at(0.8) is known.at(0.81) is not known.at(1.0)
    assert known.at(0.0) is None


def test_a_draft_chooses_at_every_sharpness_and_proposes_the_best_ones_tokens() -> None:
    logits = torch.randn(5, NUM_IDS, generator=torch.Generator().manual_seed(0)) * 2
    plain = TokenSampler(PARAMS, [], NUM_IDS)
    draft = TokenSampler(PARAMS, [], NUM_IDS, proposes=True, sharpness=Sharpness())
    assert draft.sharpness is not None
    guess = (3, 1, 4, 1)
    (expected, _), (found, notes) = sample_step(
        [SampleRequest(plain, (2, 7), guess), SampleRequest(draft, (2, 7), guess)],
        logits.repeat(2, 1),
    )
    as_target, between, likeliest = (
        list(ids) for ids in zip(*(each.choices for each in notes), strict=True)
    )
    assert found == as_target == expected
    assert likeliest == logits.argmax(-1).tolist()
    assert len({*map(tuple, (as_target, between, likeliest))}) == 3
    draft.sharpness.observe_choices((0, 0, 1), 1)
    [(found, _)] = sample_step([SampleRequest(draft, (2, 7), guess)], logits)
    assert found == likeliest


@pytest.mark.parametrize(("sureness", "best"), [(1.0, 1.0), (0.5, 2.0), (0.1, math.inf)])
def test_a_draft_less_sure_than_its_target_is_sharpened(sureness: float, best: float) -> None:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0, seed=3)
    sharpness = Sharpness()
    target = TokenSampler(params, [], NUM_IDS)
    draft = TokenSampler(params, [], NUM_IDS, proposes=True, sharpness=sharpness)
    logits = torch.randn(300, NUM_IDS, generator=generator) * 3
    rows = [SampleRequest(sampler, (), (0,) * 299) for sampler in (target, draft)]
    (token_ids, _), (_, notes) = sample_step(rows, torch.cat((logits, sureness * logits)))
    for token_id, proposal in zip(token_ids, notes, strict=True):
        sharpness.observe_choices(proposal.choices, token_id)
    assert SHARPNESSES[sharpness.place] == best
