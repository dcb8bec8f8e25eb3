"""Runs drafter, verifier and coordinator in virtual time, to judge a policy without hardware.

It simulates two devices, a gateway, and four message legs; each leg keeps the order of messages.
A model is a function from the completion ids in its KV cache to the next id. ``hippo simulate``
uses assumed costs, and property tests use hostile delays and faults.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from hippo.lab.simulation.devices import Clock, Costs, Device, KeyCache, Outage, Outcome
from hippo.speculation.branches import Proposal
from hippo.speculation.coordinator import Action, Coordinator, ToTarget
from hippo.speculation.core import Step, Wait
from hippo.speculation.drafter import Drafter
from hippo.speculation.policies import Policy
from hippo.speculation.verifier import Verifier
from hippo.types import Block, Commit, Pace, Timing, Verdict

TokenFunction = Callable[[Sequence[int]], int]

SecondChoice = Callable[[Sequence[int]], tuple[int, float]]
"""The draft's second choice after some completion ids, and its probability beside the first."""

_MS = 1_000_000


class Simulation(Clock):
    """One sequence from both prefills to its end; ``run`` can be called once."""

    def __init__(
        self,
        *,
        target: TokenFunction,
        draft: TokenFunction,
        policy: Policy,
        costs: Costs,
        max_tokens: int,
        end_token_ids: Collection[int] = (),
        num_prompt_tokens: int = 0,
        num_draft_prompt_tokens: int = 0,
        outages: Sequence[Outage] = (),
        repeat: Callable[[Action], bool] = lambda action: False,
        max_guessed: int = 0,
        num_sequences: int = 1,
        second_choice: SecondChoice = lambda history: (0, 0.0),
    ) -> None:
        """``num_prompt_tokens`` and ``num_draft_prompt_tokens`` are the cached prompt tokens of
        target and draft; costs depend on them. ``repeat`` returns whether a message of the gateway
        is sent a second time. ``num_sequences`` equal sequences share each forward of both devices,
        so a forward costs the rows of all of them. Without ``second_choice`` the draft has no
        branches.
        """
        super().__init__()
        self._target_tokens = target
        self._draft_tokens = draft
        self._second_choice = second_choice
        self._costs = costs
        self._num_prompt_tokens = num_prompt_tokens
        self._num_draft_prompt_tokens = num_draft_prompt_tokens
        self._repeat = repeat
        self._num_sequences = num_sequences
        self._new_drafter = partial(
            Drafter, max_tokens=max_tokens, end_token_ids=end_token_ids, max_guessed=max_guessed
        )
        self._coordinator = Coordinator(policy, max_tokens=max_tokens, end_token_ids=end_token_ids)
        pace = self._coordinator.pace
        self._verifier = Verifier(max_tokens=max_tokens, end_token_ids=end_token_ids, pace=pace)
        self._target = Device(self)
        self._draft = Device(self)
        self._target_keys = KeyCache()
        self._draft_keys = KeyCache()
        self._drafter: Drafter | None = None
        self._draft_number = 0  # number of drafts so far; events of an earlier draft are ignored
        self._last_arrival: dict[str, float] = {}
        self._has_drafted = False  # the draft's prefill is over
        self._outcome = Outcome()
        for outage in outages:
            self.call_after(outage.lost_ns, self._lose_draft)
            if outage.back_ns is not None:
                self.call_after(outage.back_ns, self._attach_draft)

    def run(self, *, most_events: int = 1_000_000) -> Outcome:
        """Runs to the end. Raises RuntimeError if there is none within ``most_events`` events."""
        self._open_draft()
        self._target.run(self._costs.target_prefill_ns, self._begin_target)
        while not self._coordinator.is_finished:
            if not self.has_events or self._outcome.num_events >= most_events:
                raise RuntimeError(
                    f"no end after {self._outcome.num_events} events, {self.now / _MS:.1f} ms and "
                    f"{len(self._verifier.committed_ids)} tokens"
                )
            self._outcome.num_events += 1
            self.run_next_event()
        self._outcome.output_ids = list(self._coordinator.committed_ids)
        self._outcome.stats = self._coordinator.stats
        return self._outcome

    def _send_message(self, leg: str, deliver: Callable[[], None]) -> None:
        """Delivers a message after the leg's delay, and after the leg's earlier messages."""
        at = max(self.now + self._costs.leg_ns(), self._last_arrival.get(leg, 0.0))
        self._last_arrival[leg] = at
        self.call_at(at, deliver)

    def _attended(self, core: Drafter | Verifier, keys: KeyCache, step: Step) -> list[int]:
        """Returns the ids that a step's first used row attends to; counts a step that attends to
        others than its core says."""
        ids = keys.feed(step)
        self._outcome.num_misread_steps += ids != list(core.history(step))
        return ids

    # The target.

    def _begin_target(self) -> None:
        timing = Timing(forward_ns=self._costs.target_prefill_ns)
        self._verifier.begin(self._target_tokens([]), timing)
        self._send_verdict()
        self._drive_target()

    def _drive_target(self) -> None:
        if self._target.is_busy:
            return
        step = self._verifier.next_step(round(self.now))
        if isinstance(step, Wait):
            self.call_after(max(1.0, step.until_ns - self.now), self._drive_target)
        elif step is not None:
            wait_ns = self._target.take_idle_ns()
            context = self._num_prompt_tokens + step.start_index
            num_rows = len(step.token_ids) * self._num_sequences
            duration = self._costs.target_ns(num_rows, context)
            self._target.run(duration, partial(self._finish_target, step, wait_ns, context))

    def _finish_target(self, step: Step, wait_ns: float, context: int) -> None:
        history = self._attended(self._verifier, self._target_keys, step)
        target_ids = [self._target_tokens(history)]
        for draft_id in step.guess:
            history.append(draft_id)
            target_ids.append(self._target_tokens(history))
        timing = Timing(
            forward_ns=round(self.now - self._target.began), wait_ns=round(wait_ns),
            num_rows=len(step.token_ids), context_length=context, num_sequences=self._num_sequences,
            num_batch_rows=len(step.token_ids) * self._num_sequences,
        )  # fmt: skip
        self._verifier.finish_step(step, target_ids, timing)
        self._send_verdict()
        self._target.occupy(self._costs.target_scheduling_ns())
        self._drive_target()

    def _send_verdict(self) -> None:
        [verdict] = self._verifier.take_messages()
        self._outcome.verdicts.append(verdict)
        if verdict.start_index == 0:
            self._outcome.first_token_ns = self.now
        self._outcome.decode_ns = self.now - self._outcome.first_token_ns
        self._target.occupy(self._costs.target_message_ns)
        self._send_message("target to gateway", partial(self._on_verdict, verdict))

    def _reach_target(self, message: Block | Pace) -> None:
        self._target.occupy(self._costs.target_message_ns)
        if isinstance(message, Block) and not self._verifier.is_finished:
            self._outcome.num_out_of_step += message.epoch > self._verifier.epoch
        self._verifier.receive(message)
        self._drive_target()

    # The draft.

    def _open_draft(self) -> None:
        self._draft_number += 1
        self._draft_keys = KeyCache()
        self._has_drafted = False
        now = self._coordinator
        self._drafter = self._new_drafter(
            pace=now.pace, committed_ids=now.committed_ids, epoch=now.epoch
        )
        self._draft.occupy(max(0.0, self._costs.draft_prefill_delay_ns - self.now))
        begin = partial(self._begin_draft, self._draft_number)
        self._draft.run(self._costs.draft_prefill_ns, begin)

    def _begin_draft(self, number: int) -> None:
        if self._drafter is not None and number == self._draft_number:
            first = self._propose([])
            self._drafter.begin(first.token_id, notes=[first])
            self._has_drafted = True
            self._report_draft_ready()
            self._drive_draft()

    def _report_draft_ready(self) -> None:
        actions = self._coordinator.on_draft_ready()
        if self._outcome.verdicts:
            self._carry_out(actions)
            return
        for action in actions:  # a message during the target's prefill costs no time
            if isinstance(action, ToTarget):
                self._verifier.receive(action.message)

    def _drive_draft(self) -> None:
        drafter = self._drafter
        if drafter is None or self._draft.is_busy:
            return
        has_sent = self._send_block(drafter)
        step = drafter.next_step()
        if has_sent:  # without a next step, sending counts as idle time
            self._draft.occupy(self._costs.draft_message_ns, by_others=step is None)
        if step is not None:
            context = self._num_draft_prompt_tokens + step.start_index
            num_rows = len(step.token_ids) * self._num_sequences
            duration = self._costs.draft_ns(num_rows, context)
            self._draft.run(duration, partial(self._finish_draft, self._draft_number, step))

    def _finish_draft(self, number: int, step: Step) -> None:
        if self._drafter is not None and number == self._draft_number:
            history = self._attended(self._drafter, self._draft_keys, step)
            proposals = [self._propose(history)]
            for guessed_id in step.guess:
                history.append(guessed_id)
                proposals.append(self._propose(history))
            timing = Timing(
                forward_ns=round(self.now - self._draft.began),
                wait_ns=round(self._draft.take_idle_ns()),
            )
            token_ids = [proposal.token_id for proposal in proposals]
            self._drafter.finish_step(step, token_ids, timing, proposals)
            self._drive_draft()

    def _propose(self, history: Sequence[int]) -> Proposal:
        return Proposal(self._draft_tokens(history), *self._second_choice(history))

    def _send_block(self, drafter: Drafter) -> bool:
        blocks = drafter.take_messages()
        for block in blocks:
            number = self._draft_number
            self._send_message(f"draft {number} to gateway", partial(self._on_block, number, block))
        return bool(blocks)

    def _reach_draft(self, number: int, message: Commit | Pace) -> None:
        if self._drafter is None or number != self._draft_number:
            return
        self._draft.occupy(self._costs.draft_message_ns, by_others=True)
        self._drafter.receive(message)
        self._drive_draft()

    # The gateway.

    def _on_block(self, number: int, block: Block) -> None:
        if number == self._draft_number and self._drafter is not None:
            self._carry_out(self._coordinator.on_block(block, round(self.now)))

    def _on_verdict(self, verdict: Verdict) -> None:
        self._carry_out(self._coordinator.on_verdict(verdict, round(self.now)))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._relay(action)
            if not isinstance(action.message, Commit) and self._repeat(action):
                self.call_after(self._costs.leg_ns(), partial(self._relay, action))

    def _relay(self, action: Action) -> None:
        if isinstance(action, ToTarget):
            self._send_message("gateway to target", partial(self._reach_target, action.message))
        else:
            number = self._draft_number
            deliver = partial(self._reach_draft, number, action.message)
            self._send_message(f"gateway to draft {number}", deliver)

    def _lose_draft(self) -> None:
        if self._drafter is not None:
            self._drafter = None
            self._draft = Device(self)
            self._carry_out(self._coordinator.on_draft_lost())

    def _attach_draft(self) -> None:
        if self._drafter is None and not self._coordinator.is_finished:
            self._open_draft()
            num_committed = len(self._coordinator.committed_ids)
            self._carry_out(self._coordinator.on_draft_attached(num_committed))
