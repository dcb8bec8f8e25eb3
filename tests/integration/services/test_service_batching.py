"""Many sequences at once: what they share, and that none of them can tell."""

import asyncio
import time

import pytest

from hippo.types import OpenRequest, SamplingParams
from tests.support.models.toy_model import ToyModel
from tests.support.running.services import (
    relay,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
)

NUM_SEQUENCES = 8
MIXED = ("adaptive", "vpsd", "serial", "off", "optimistic", "adaptive", "conservative", "vpsd")


def requests() -> list[OpenRequest]:
    """Prompts and answers of different lengths, every second one sampled."""
    return [
        toy_request(
            "what happens" + " next" * number + "?",
            max_tokens=20 + 9 * number,
            sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(NUM_SEQUENCES)
    ]


@pytest.mark.parametrize("policies", [("adaptive",) * NUM_SEQUENCES, MIXED])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
async def test_sequences_of_all_lengths_together_equal_each_alone(
    policies: tuple[str, ...], noise: float
) -> None:
    model = ToyModel(num_slots=NUM_SEQUENCES)
    # A moment, in which the other sequences get ready for the next forward.
    model.on_forward = lambda plan: time.sleep(0.001)
    draft = ToyModel(num_slots=NUM_SEQUENCES, noise=noise)
    async with serving_pair(model, draft) as (target_client, draft_client):
        alone = [(await target_only(target_client, one)).token_ids for one in requests()]
        model.plans.clear()
        together = await asyncio.gather(
            *(
                relay(draft_client, target_client, one, policy)
                for one, policy in zip(requests(), policies, strict=True)
            )
        )

    assert [answer.token_ids for answer in together] == alone
    assert max(len(plan.sequences) for plan in model.plans) > 1, "no forward was shared"


async def test_a_verdict_says_what_its_forward_was_shared_with() -> None:
    model = ToyModel(num_slots=NUM_SEQUENCES)
    async with serving_target(model) as (_, client):
        model.plans.clear()  # those that warmed it up
        answers = await asyncio.gather(*(target_only(client, one) for one in requests()))

    timings = [verdict.timing for answer in answers for verdict in answer.verdicts[1:]]
    assert all(1 <= timing.num_rows <= timing.num_batch_rows for timing in timings)
    assert {(timing.num_sequences, timing.num_batch_rows) for timing in timings} == {
        (len(plan.sequences), plan.num_rows) for plan in model.plans
    }
