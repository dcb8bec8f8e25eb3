"""The gateway's part of an answer whose draft's device hangs while its event loop lives: real
services, which answer pings and take streams all the while."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from gateway.answer.completion import Completion
from gateway.pairs.backends import Backends
from hippo.metrics.gateway import DraftLoss
from hippo.models.interface.base import StepPlan
from hippo.speculation.coordinator import Action, Coordinator
from hippo.types import Block
from tests.support.models.toy_model import ToyModel
from tests.support.running.gateways import completed, watching
from tests.support.running.services import serving_pair, target_only, toy_request, with_tokenizer

REQUEST = toy_request(max_tokens=40, end_token_ids=())
STALL_S = 0.3
LONG_NS = 500_000_000  # half of what patient policies wait


class HangingDraft(ToyModel):
    """Always right; its device hangs at the completion index ``hang_at``, until ``free``."""

    def __init__(self) -> None:
        super().__init__(num_slots=4)
        with_tokenizer(self)
        self.hang_at: int | None = None
        self.free = threading.Event()
        self.on_forward = self._hang_in_forward

    def hang_in_prefill(self) -> None:
        self.on_piece = lambda slot: self._hang()

    def _hang_in_forward(self, plan: StepPlan) -> None:
        ends = [rows.start_index + len(rows.token_ids) for rows in plan.sequences]
        if self.hang_at is not None and max(ends) > self.hang_at:
            self._hang()

    def _hang(self) -> None:
        assert self.free.wait(100)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the gateway has behind it, and the answer of the target alone."""

    backends: Backends
    expected: list[int]

    async def answer(
        self, policy: str, *, max_draft_tokens: int = 4, stall_s: float = STALL_S
    ) -> Completion:
        found = await completed(
            self.backends, REQUEST, policy, max_draft_tokens=max_draft_tokens, stall_s=stall_s
        )
        assert found.error is None and found.token_ids == self.expected
        return found


@asynccontextmanager
async def pair(draft: HangingDraft, *, step_s: float = 0.01) -> AsyncIterator[Gateway]:
    """The target is slower than the draft, which gets as far ahead as it may go."""
    target = with_tokenizer(ToyModel())
    target.on_forward = lambda plan: time.sleep(step_s)
    async with serving_pair(target, draft) as (target_client, draft_client):
        expected = await target_only(target_client, REQUEST)
        async with watching([target_client], [draft_client]) as backends:
            try:
                yield Gateway(backends, expected.token_ids)
            finally:
                draft.free.set()


def num_long_waits(completion: Completion) -> int:
    timeline = completion.record.timeline
    assert timeline is not None
    return sum(verdict.timing.wait_ns > LONG_NS for _, verdict in timeline.verdicts)


@pytest.mark.parametrize("policy", ["serial", "optimistic"])
async def test_a_draft_that_hangs_where_all_it_said_was_right_is_given_up(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = HangingDraft()
    async with pair(draft) as gateway:
        draft.hang_at = 24
        (watch,) = gateway.backends.drafts
        report = Mock(wraps=watch.report_failure)
        monkeypatch.setattr(watch, "report_failure", report)
        completion = await gateway.answer(policy)
        assert completion.record.draft_losses == [DraftLoss.STALLED]
        assert completion.record.draft_problem == "the draft stalled"
        assert report.called, "other answers must not be given to it"
        # Once until the stall is noticed; the draft that is asked to join costs nothing.
        assert num_long_waits(completion) == 1


async def test_a_draft_that_never_ends_its_prefill_costs_nothing() -> None:
    draft = HangingDraft()
    async with pair(draft) as gateway:
        draft.hang_in_prefill()
        completion = await gateway.answer("serial")
        assert completion.record.draft_losses == []
        assert num_long_waits(completion) == 0


@pytest.mark.parametrize("policy", ["vpsd", "adaptive"])
async def test_a_draft_that_is_well_is_used_and_never_given_up(policy: str) -> None:
    async with pair(HangingDraft()) as gateway:
        completion = await gateway.answer(policy, stall_s=2.0)
        assert completion.record.draft_losses == []
        assert completion.record.stats.num_blocks > 0


async def test_a_draft_that_is_far_ahead_or_at_the_end_is_silent_in_good_order() -> None:
    """For longer than a stall may last: the target settles two tokens in a step."""
    async with pair(HangingDraft(), step_s=0.03) as gateway:
        completion = await gateway.answer("conservative", max_draft_tokens=32)
        assert completion.record.draft_losses == []
        timeline = completion.record.timeline
        assert timeline is not None
        (last_block_ns, _), (last_verdict_ns, _) = timeline.blocks[-1], timeline.verdicts[-1]
        assert last_verdict_ns - last_block_ns > 1e9 * STALL_S, "the draft was not silent"


async def test_a_fault_of_the_gateways_own_about_a_draft_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_coordinator: Coordinator, _block: Block, _now_ns: int) -> list[Action]:
        raise KeyError("a fault")

    async with pair(HangingDraft()) as gateway:
        monkeypatch.setattr(Coordinator, "on_block", fail)
        completion = await gateway.answer("serial")
        assert completion.record.draft_losses == [DraftLoss.ERROR]
        assert num_long_waits(completion) <= 1
    assert "drafting failed" in caplog.messages
