"""What a draft proposes: its two best choices, and the best ones with less noise."""

import math

import pytest
import torch

from hippo.sampling.sampler import SampleRequest, TokenSampler, sample_step
from hippo.speculation.sharpness import SHARPNESSES, Sharpness
from hippo.types import SamplingParams

NUM_IDS = 40
PARAMS = SamplingParams(temperature=0.9, top_k=12, seed=7)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_proposes_its_two_best_choices(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    sharpness = Sharpness() if temperature else None
    draft = TokenSampler(params, [], 40, proposes=True, sharpness=sharpness)
    target = TokenSampler(params, [], 40)
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    [(found, notes)] = sample_step([SampleRequest(draft, (), (1, 2, 3, 4))], logits)
    [(expected, _)] = sample_step([SampleRequest(target, (), (1, 2, 3, 4))], logits)
    assert found == expected == [proposal.token_id for proposal in notes]
    others = logits.scatter(1, torch.tensor(found)[:, None], float("-inf"))
    [(seconds, _)] = sample_step([SampleRequest(target, (), (1, 2, 3, 4))], others)
    assert seconds == [proposal.second_id for proposal in notes]
    if not temperature:
        chances = logits.double().softmax(-1)
        for row, proposal in enumerate(notes):
            first, second = chances[row, proposal.token_id], chances[row, proposal.second_id]
            assert proposal.second_share == pytest.approx(float(second / (first + second)))


def test_the_only_token_that_is_left_has_no_second_choice() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, 7] = 1.0
    draft = TokenSampler(SamplingParams(), [], 40, proposes=True)
    [(found, [proposal])] = sample_step([SampleRequest(draft, ())], logits)
    assert found == [7] and proposal.second_share < 1e-9


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
