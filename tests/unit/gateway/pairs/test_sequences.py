"""Which target and which draft a sequence has, when services are full or break."""

import asyncio
import time
from collections.abc import Callable

import pytest

from hippo.errors import UnavailableError
from hippo.models.interface.base import StepPlan
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.gateways import completion_of, until_up, watching
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_target,
    toy_request,
    until,
    with_tokenizer,
)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Holds a device thread."""
    while not condition():
        time.sleep(0.005)


@pytest.mark.parametrize("broken", ["target", "draft"])
async def test_a_service_that_breaks_a_stream_is_left_out_at_once(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when its health is looked at for the next time."""
    monkeypatch.setattr("gateway.pairs.watch._PERIOD_UP_S", 3600.0)
    model, gate = with_tokenizer(ToyModel()), Gate()
    async with (
        serving_target(model) as (target, target_client),
        serving_draft(with_tokenizer(ToyModel())) as (draft, draft_client),
        watching([target_client], [draft_client]) as backends,
    ):
        model.on_forward = gate
        completion = completion_of(backends.pair(None), toy_request(), "serial")
        try:
            async with completion:
                await until(gate.has_arrived.is_set)
                await until(lambda: completion.record.stats.num_blocks > 0)
                await {"target": target, "draft": draft}[broken].rpc.stop()
                if broken == "target":
                    await until(lambda: completion.is_over)
                    assert isinstance(completion.error, UnavailableError)
                    with pytest.raises(UnavailableError):
                        backends.pair(None)
                else:
                    await until(lambda: bool(completion.record.draft_losses))
                    await until_up(backends, 1, 0)
                    gate.open()
                    await until(lambda: completion.is_over)
                    assert completion.error is None
        finally:
            gate.open()


async def test_a_sequence_in_the_targets_queue_leaves_the_drafts_slots_to_running_ones() -> None:
    model, gate = with_tokenizer(ToyModel(num_slots=1)), Gate()

    async with (
        serving_target(model) as (target, client),
        serving_draft(with_tokenizer(ToyModel(num_slots=2))) as (draft, draft_client),
        watching([client], [draft_client]) as backends,
    ):
        pair = backends.pair(None)
        first, second = (completion_of(pair, toy_request(), "serial") for _ in range(2))
        opened = backend_of(draft).engine.counters

        num_before = len(model.reused)  # prefills, of the warm-up

        def num_begun() -> int:
            return len(model.reused) - num_before

        def prefill(_: int) -> None:
            """A sequence has its draft from the beginning."""
            _wait_until(lambda: opened.num_opened == num_begun())

        def step(plan: StepPlan) -> None:
            gate(plan)
            running = (first, second)[num_begun() - 1]
            _wait_until(lambda: running.record.stats.num_blocks > 0)

        model.on_piece, model.on_forward = prefill, step
        async with first:
            await until(gate.has_arrived.is_set)
            async with second:
                await until(lambda: backend_of(target).slots.num_waiting == 1)
                await asyncio.sleep(0.1)
                assert opened.num_opened == 1
                gate.open()
                await until(lambda: first.is_over and second.is_over)
        for completion in (first, second):
            assert completion.error is None and completion.record.draft_losses == []
            assert completion.record.num_draft_recoveries == 0
            assert completion.record.stats.num_blocks > 0
