"""Toy models, and simulated sequences that check what must hold of every one."""

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from hippo.lab.simulation.devices import Costs, KeyCache, Outage, Outcome
from hippo.lab.simulation.simulator import SecondChoice, Simulation, TokenFunction
from hippo.speculation.coordinator import Action
from hippo.speculation.drafter import Drafter
from hippo.speculation.policies import FixedPolicy, Policy
from hippo.speculation.verifier import Verifier
from hippo.types import Block, Pace, StepLimits, Verdict

MS = 1_000_000


def _hash(*values: object) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=4).digest())


def toy_target(seed: int, num_ids: int) -> TokenFunction:
    """The next id is a function of the last three and of the index."""
    return lambda history: _hash(seed, len(history), *history[-3:]) % num_ids


def toy_draft(target: TokenFunction, seed: int, agreement: float, num_ids: int) -> TokenFunction:
    """Agrees with the target in a share of all histories, the rest is up to another hash."""

    def draft(history: Sequence[int]) -> int:
        if _hash(seed, "agree", len(history), *history[-2:]) / 2**32 < agreement:
            return target(history)
        return _hash(seed, "other", len(history), *history[-3:]) % num_ids

    return draft


def toy_second_choice(target: TokenFunction, seed: int, num_ids: int) -> SecondChoice:
    """Is the target's token in half of all histories, and has any share up to a half."""

    def second_choice(history: Sequence[int]) -> tuple[int, float]:
        share = _hash(seed, "share", len(history), *history[-2:]) / 2**33
        if _hash(seed, "second", len(history), *history[-2:]) % 2:
            return target(history), share
        return _hash(seed, "third", len(history), *history[-2:]) % num_ids, share

    return second_choice


def decode_alone(target: TokenFunction, max_tokens: int, end_token_ids: set[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and not (ids and ids[-1] in end_token_ids):
        ids.append(target(ids))
    return ids


class RestlessPolicy(FixedPolicy):
    """Any pace at any time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        super().__init__(self._any_pace())

    def observe_verdict(self, verdict: Verdict, outcomes: Sequence[bool], now_ns: int) -> None:
        if self._random.random() < 0.3:
            self.pace = self._any_pace()

    def observe_block(self, block: Block, outcomes: Sequence[bool], now_ns: int) -> None:
        if self._random.random() < 0.1:
            self.pace = self._any_pace()

    def _any_pace(self) -> Pace:
        return Pace(
            optimistic=self._any_limits(),
            conservative=self._any_limits(),
            max_ahead=self._random.choice((0, 1, 2, 5, 16)),
            block_size=self._random.choice((0, 1, 2, 4)),
            max_reused=self._random.choice((0, 1, 5)),
            max_branched=self._random.choice((0, 2, 16)),
        )

    def _any_limits(self) -> StepLimits:
        return StepLimits(
            self._random.choice((0, 1, 4)),
            self._random.choice((0, 1, 3, 8)),
            self._random.choice((0, 1, 20)) * MS,
        )


def run(
    *,
    policy: Policy,
    agreement: float,
    seed: int,
    max_tokens: int,
    end_token_ids: set[int],
    num_ids: int,
    leg_ns: Callable[[], float],
    draft_ns: Callable[[int, int], float],
    outages: Sequence[Outage] = (),
    repeat: Callable[[Action], bool] = lambda action: False,
    draft_prefill_ns: int = 30 * MS,
) -> Outcome:
    """Runs one sequence and checks all that must hold of any."""
    target = toy_target(seed, num_ids)
    outcome = CheckedSimulation(
        target=target,
        draft=toy_draft(target, seed, agreement, num_ids),
        policy=policy,
        costs=Costs(
            target_ns=lambda num_rows, context: MS * (9 + num_rows),
            draft_ns=draft_ns,
            leg_ns=leg_ns,
            draft_prefill_ns=draft_prefill_ns,
            draft_message_ns=100_000,
        ),
        max_tokens=max_tokens,
        end_token_ids=end_token_ids,
        outages=outages,
        repeat=repeat,
        max_guessed=seed % 5,
        second_choice=toy_second_choice(target, seed, num_ids),
    ).run(most_events=400 * max_tokens + 4_000)
    assert outcome.output_ids == decode_alone(target, max_tokens, end_token_ids)
    assert outcome.num_out_of_step == 0
    assert outcome.num_misread_steps == 0
    check_verdicts(outcome, max_tokens)
    check_stats(outcome)
    return outcome


class CheckedSimulation(Simulation):
    """Checks after every event that the KV caches hold what the cores say that they hold, and that
    the gateway knows when the draft is silent in good order."""

    _num_in_flight = 0  # messages to the draft and from it

    def call_at(self, time_ns: float, event: Callable[[], None]) -> None:
        def watched() -> None:
            event()
            self._check_keys(self._verifier, self._target_keys)
            self._check_keys(self._drafter, self._draft_keys)
            self._check_debt()

        super().call_at(time_ns, watched)

    def _send_message(self, leg: str, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            self._num_in_flight -= 1
            deliver()

        is_drafts = "draft" in leg
        self._num_in_flight += is_drafts
        super()._send_message(leg, arrive if is_drafts else deliver)

    def _check_keys(self, core: Drafter | Verifier | None, keys: KeyCache) -> None:
        if core is not None:
            fed = list(core.fed_ids)
            assert list(keys.ids)[: len(fed)] == fed

    def _check_debt(self) -> None:
        owes, drafter = self._coordinator.owes_block, self._drafter
        if drafter is None or not self._has_drafted or not self._coordinator.committed_ids:
            assert not owes
        elif not self._coordinator.is_finished and not self._num_in_flight:
            has_more = not drafter.is_exhausted or drafter._num_sent < len(drafter.ids)
            assert not owes or (self._draft.is_busy and has_more)
            # Of a run that the drafter knows to be broken the next verdict tells the gateway.
            if drafter.epoch == self._coordinator.epoch:
                assert owes or drafter.is_exhausted


def check_verdicts(outcome: Outcome, max_tokens: int) -> None:
    ids: list[int] = []
    epoch = 0
    for verdict in outcome.verdicts:
        assert verdict.start_index == len(ids)
        assert verdict.token_ids
        assert verdict.num_accepted_tokens <= verdict.num_draft_tokens
        assert verdict.num_accepted_reused <= verdict.num_reused_tokens
        num_accepted = verdict.num_accepted_tokens + verdict.num_accepted_reused
        assert len(verdict.token_ids) - num_accepted in (0, 1)
        assert verdict.epoch >= epoch + verdict.is_rejection
        assert verdict.num_dropped_tokens >= verdict.is_rejection
        epoch = verdict.epoch
        ids.extend(verdict.token_ids)
    assert ids == outcome.output_ids
    assert all(verdict.finish_reason is None for verdict in outcome.verdicts[:-1])
    assert outcome.verdicts[-1].finish_reason is not None


def check_stats(outcome: Outcome) -> None:
    stats = outcome.stats
    assert stats.num_output_tokens == len(outcome.output_ids)
    assert stats.num_forwards == len(outcome.verdicts) - 1
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens <= stats.num_output_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.num_draft_tokens == sum(stats.verified_per_position)
    assert sum(stats.all_run_lengths) <= stats.num_output_tokens  # none while the draft rests
    num_used = stats.num_accepted_tokens + stats.num_accepted_reused
    assert num_used <= stats.num_drafted_tokens
    assert stats.num_branches_taken <= stats.num_rejections
    num_told_apart = (
        stats.num_rejected_tokens + stats.num_behind_rejection_tokens + stats.num_stale_tokens
    )
    assert num_told_apart <= stats.num_dropped_tokens
    assert stats.num_rejected_tokens <= stats.num_rejections
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.num_rejections >= len(stats.run_lengths)
