"""A draft whose slots cache less than the context: small random checkpoints in fp32 behind the
gateway's part of an answer."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.answer.completion import Completion
from gateway.answer.report import AnswerRecord
from hippo.metrics.gateway import DraftLoss
from hippo.models.interface.base import StepPlan
from hippo.models.interface.context import most_kept
from hippo.pruning.select import num_kept
from hippo.types import Media, MediaKind, OpenRequest, Pruning, PruningStrategy
from tests.support.models.pairs import NoiseDecoder, load
from tests.support.running.gateways import completed, watching
from tests.support.running.services import (
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)

CACHE_TOKENS = 128
VIDEO = Media(MediaKind.VIDEO, b"a video of as many frames as this has letters, on and on")
HOLISTIC = Pruning(PruningStrategy.HOLISTIC, 0.9)

Ask = Callable[[OpenRequest], Awaitable[Completion]]


def question(pruning: Pruning, *, max_tokens: int = 20, text: str = "what?") -> OpenRequest:
    return toy_request(
        text, media=(VIDEO,), pruning=pruning, max_tokens=max_tokens, end_token_ids=()
    )


@pytest.fixture
def draft_options() -> dict[str, Any]:
    return {"cache_tokens": CACHE_TOKENS}


@pytest.fixture
async def ask(
    target_checkpoint: Path, draft_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ask]:
    """A function that answers a request by a target and a draft of the same weights, checks that
    the answer is the target's own, and that all slots are free again. The target steps when the
    draft is ready or lost, and slowly: it would be over at once."""
    target, draft = load(target_checkpoint), load(target_checkpoint, **draft_options)
    may_step, forward = threading.Event(), target.forward

    def step(plan: StepPlan) -> torch.Tensor:
        assert may_step.wait(60)
        time.sleep(0.005)
        return forward(plan)

    async with (
        serving_target(target, NoiseDecoder()) as (target_service, target_client),
        serving_draft(draft, NoiseDecoder()) as (draft_service, draft_client),
        watching([target_client], [draft_client]) as backends,
    ):

        async def ask(request: OpenRequest) -> Completion:
            may_step.set()
            expected = await target_only(target_client, request)
            may_step.clear()
            record = AnswerRecord(policy="serial", received_ns=time.monotonic_ns())
            asked = completed(backends, request, "serial", stall_s=20.0, record=record)
            answer = asyncio.create_task(asked)
            await until(lambda: bool(record.draft_prefill or record.draft_losses))
            may_step.set()
            completion = await answer
            assert completion.error is None
            assert completion.token_ids == expected.token_ids
            assert len(completion.token_ids) == request.max_tokens
            for service in (target_service, draft_service):
                await until_free(service)
            return completion

        monkeypatch.setattr(target, "forward", step)
        yield ask
        may_step.set()


def sizes_of(completion: Completion) -> tuple[int, int, int]:
    """Numbers of visual tokens and of others of the prompt, and of visual ones that are kept."""
    prompt, selection = completion.record.target_prompt, completion.record.selection
    assert prompt is not None and selection is not None
    num_visual = prompt.num_visual_tokens
    return num_visual, prompt.num_prompt_tokens - num_visual, len(selection.kept_indices)


async def test_a_long_video_is_answered_with_a_draft_that_caches_its_pruned_prompt(
    ask: Ask,
) -> None:
    first = await ask(question(HOLISTIC))
    num_visual, num_others, num_first = sizes_of(first)
    assert num_visual > 2 * CACHE_TOKENS, "the whole prompt has no room"
    assert num_first == num_kept(num_visual, 0.9), "as many as it asked for"
    assert first.record.stats.num_draft_tokens > 0
    assert first.record.draft_problem is None
    second = await ask(question(HOLISTIC))
    assert second.record.draft_prefill is not None
    # Of the pruned prompt all but the last row, whose logits are needed.
    assert second.record.draft_prefill.context_length == num_others + num_first - 1
    assert sizes_of(await ask(question(Pruning(PruningStrategy.BLIND))))[2] == 0


@pytest.mark.parametrize(
    "pruning",
    [
        Pruning(PruningStrategy.NONE),
        Pruning(PruningStrategy.HOLISTIC, 0.0),
        Pruning(PruningStrategy.HOLISTIC, 0.9, min_visual_tokens=500),
        Pruning(PruningStrategy.ATTENTION, 0.3),
        Pruning(PruningStrategy.RANDOM, 0.3),
        Pruning(PruningStrategy.SPECVLM, 0.3),
    ],
    ids=lambda pruning: f"{pruning.strategy.value}-{pruning.ratio}",
)
async def test_of_more_than_has_room_as_many_visual_tokens_are_kept_as_have(
    pruning: Pruning, ask: Ask
) -> None:
    completion = await ask(question(pruning))
    _, num_others, num_kept = sizes_of(completion)
    assert num_kept == most_kept(CACHE_TOKENS, num_others, 20) > 0
    assert num_others + num_kept + 20 == CACHE_TOKENS
    assert completion.record.stats.num_draft_tokens > 0
    assert completion.record.draft_problem is None, "the whole answer has room"


async def test_a_text_without_room_is_answered_without_the_draft_and_says_why(ask: Ask) -> None:
    completion = await ask(question(HOLISTIC, text="word " * 19))
    assert sizes_of(completion)[1] > CACHE_TOKENS
    assert completion.record.stats.num_draft_tokens == 0
    assert completion.record.draft_losses == [DraftLoss.NO_ROOM]
    problem = completion.record.draft_problem
    assert problem is not None and "leaves no room in the 128 tokens" in problem
    assert "--cache-tokens" in problem
    again = await ask(question(HOLISTIC))
    assert again.record.draft_problem is None, "the next one has its draft"


async def test_an_answer_that_outgrows_the_slot_goes_on_without_the_draft(ask: Ask) -> None:
    completion = await ask(question(Pruning(PruningStrategy.NONE), max_tokens=100))
    _, num_others, num_kept = sizes_of(completion)
    assert num_kept == most_kept(CACHE_TOKENS, num_others, CACHE_TOKENS // 4)
    assert completion.record.stats.num_draft_tokens > 0
    assert completion.record.draft_losses == [DraftLoss.NO_ROOM]
    problem = completion.record.draft_problem
    assert problem is not None and "tokens do not fit in the 128 tokens" in problem


@pytest.mark.parametrize("draft_options", [{"prunes": True}])
async def test_a_draft_with_room_for_all_sees_what_the_request_asks_for(ask: Ask) -> None:
    completion = await ask(question(Pruning(PruningStrategy.NONE)))
    num_visual, _, num_kept = sizes_of(completion)
    assert num_kept == num_visual
