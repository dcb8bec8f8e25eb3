"""The target's side of one sequence: what is settled, what is queued, what to verify next.

How both sides agree on which blocks are stale
----------------------------------------------
An epoch is one run of the draft. A run ends when a token that the draft *sent* differs from the
settled token at the same index. Each side detects the difference on its own:

- The verifier holds both tokens in a forward, or when it compares its own token after an accepted
  block with the queue, or when a block arrives that begins at indices already settled (equal ids
  are skipped, and the first difference ends the run).
- The drafter finds that a commit differs from the tokens that it sent
  (:mod:`hippo.speculation.drafter`).

Each side then raises its epoch by one. Streams are ordered, so the block with the differing token
arrives before any block of the next run, and the two epochs agree whichever side detects the
difference first. A verdict carries the verifier's epoch. A drafter with a lower epoch adopts it and
sends the tokens that the verifier dropped again. This also holds for a draft that joins in
mid-answer, because it begins with an epoch that the verifier has reached or passed.
The output does not depend on epochs (docs/protocol.md).
"""

from collections.abc import Collection, Sequence

from hippo.speculation.continuations import BrokenRun
from hippo.speculation.core import PROMPT_STEP, Step, Wait
from hippo.types import Block, FinishReason, Pace, Timing, TokenLogprobs, Verdict


class Verifier:
    """Settles the tokens of one sequence; see :mod:`hippo.speculation.core`.

    A step feeds the last settled id, and the queued draft tokens as its guess. After a rejection
    the guess can be a branch that the draft had sent for the target's token, or else what the
    broken run had after its wrong token (docs/algorithms.md, "Reuse").
    """

    def __init__(self, *, max_tokens: int, end_token_ids: Collection[int], pace: Pace) -> None:
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._pace = pace
        self.committed_ids: list[int] = []  # the settled ids, from completion index 0
        self._run: list[int] = []  # queued draft tokens, the first at index _run_start
        self._run_start = 0
        self._broken_run = BrokenRun()  # what the last rejected run had after its wrong token
        self._branches: dict[int, tuple[int, ...]] = {}  # the run's branches, by index
        self._branch = BrokenRun()  # the branch that the last rejected run goes on with
        self.epoch = 0
        self.is_conservative = False  # whether the last comparison was a rejection
        self._is_exhausted = False  # whether the draft sends nothing more before the next commit
        self.is_finished = False
        self._idle_since_ns: int | None = None
        self._step: Step | None = None
        self._is_step_conservative = self._is_step_reuse = False
        self._num_dropped = 0  # since the last verdict
        self._verdicts: list[Verdict] = []  # for take_messages

    @property
    def fed_ids(self) -> Sequence[int]:
        # The next step feeds the last settled id.
        return self.committed_ids[:-1]

    def set_max_tokens(self, max_tokens: int) -> None:
        assert not self.committed_ids and max_tokens >= 1
        self._max_tokens = max_tokens

    def receive(self, message: Block | Pace) -> None:
        if isinstance(message, Block):
            self.add_block(message)
        else:
            self._pace = message

    def take_messages(self) -> list[Verdict]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def add_block(self, block: Block) -> None:
        """Queues a block's ids, at any time, also while a forward runs.

        Ids are not queued that are of an older epoch, after a gap, queued or settled already, or
        behind an end token, the token limit or a rejected token.
        """
        ids = block.token_ids
        if self.is_finished:
            return
        if block.epoch > self.epoch:
            self.epoch = block.epoch
            self._drop_run()
        if block.epoch < self.epoch or block.start_index > self._end_index:
            self._num_dropped += len(ids)
            return
        self._is_exhausted = block.is_exhausted
        self._branches |= {branch.index: branch.token_ids for branch in block.branches}
        for offset, token_id in enumerate(ids):
            index = block.start_index + offset
            if index < len(self.committed_ids):
                self.is_conservative = False
                if token_id != self.committed_ids[index]:
                    self._num_dropped += len(ids) - offset
                    self._reject_run(index)
                    end = len(self.committed_ids)
                    self._broken_run = BrokenRun(ids[end - block.start_index :], end)
                    break
            else:
                self._enqueue_token(index, token_id)

    def begin(self, token_id: int, timing: Timing, notes: Sequence[TokenLogprobs] = ()) -> None:
        assert not self.committed_ids, "begin is called once"
        self._settle_tokens((token_id,), PROMPT_STEP, 0, timing, notes)

    def history(self, step: Step) -> Sequence[int]:
        return self.committed_ids

    def next_step(self, now_ns: int) -> Step | Wait | None:
        assert self._step is None, "the last step is not finished"
        if self.is_finished or not self.committed_ids:
            return None
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns
        limits = self._pace.conservative if self.is_conservative else self._pace.optimistic
        num_room = (
            self._max_tokens - len(self.committed_ids) - 1
        )  # the target's own token takes one
        num_most = max(0, min(limits.max_draft_tokens, num_room))
        draft_ids = tuple(self._run[:num_most])
        branch_ids, reused_ids = self._ids_after_rejection(num_room)
        num_wanted = 0 if branch_ids or reused_ids else min(limits.min_draft_tokens, num_most)
        until_ns = self._idle_since_ns + limits.wait_ns
        if len(self._run) < num_wanted and not self._has_all() and now_ns < until_ns:
            return Wait(until_ns)
        guess = branch_ids or reused_ids or draft_ids
        start_index = len(self.committed_ids) - 1
        self._step = Step(start_index, (self.committed_ids[-1], *guess), len(guess))
        self._is_step_conservative = self.is_conservative
        self._is_step_reuse = bool(reused_ids)
        return self._step

    def finish_step(
        self,
        step: Step,
        target_ids: Sequence[int],
        timing: Timing,
        notes: Sequence[TokenLogprobs] = (),
    ) -> int:
        """Settles tokens of ``target_ids``; ``target_ids[k]`` is the target's token after row k.

        If the draft token at the index of the last settled token is queued, the two are compared.
        """
        assert step is self._step, "not the step in progress"
        assert len(target_ids) == len(step.token_ids), "one target token a row"
        num_accepted = 0
        for draft_id, target_id in zip(step.guess, target_ids, strict=False):
            if draft_id != target_id:
                break
            num_accepted += 1
        settled = tuple(target_ids[: num_accepted + 1])
        return self._settle_tokens(settled, step, num_accepted, timing, notes)

    def _ids_after_rejection(self, num_room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns tokens of a branch, or else of the broken run, to verify while the next run has
        none; often neither."""
        if not self.is_conservative or self._run:
            return (), ()
        most = min(self._pace.conservative.max_draft_tokens, num_room)
        branch_ids = self._branch.guess_after(self.committed_ids, most) if most > 0 else ()
        most = min(self._pace.max_reused, num_room)
        if branch_ids or most < 1:
            return branch_ids, ()
        return (), self._broken_run.guess_after(self.committed_ids, most)

    def _has_all(self) -> bool:
        """Whether no further draft token can arrive before the next verdict."""
        return self._is_exhausted or bool(self._run and self._run[-1] in self._end_token_ids)

    def _settle_tokens(
        self,
        token_ids: tuple[int, ...],
        step: Step,
        num_accepted: int,
        timing: Timing,
        logprobs: Sequence[TokenLogprobs],
    ) -> int:
        start_index = len(self.committed_ids)
        finish_reason = None
        ends = (end for end, token_id in enumerate(token_ids, 1) if token_id in self._end_token_ids)
        if (end := next(ends, None)) is not None:
            token_ids, finish_reason = token_ids[:end], FinishReason.STOP
        self.committed_ids.extend(token_ids)
        assert len(self.committed_ids) <= self._max_tokens, "a step is clipped to what is left"
        if finish_reason is None and len(self.committed_ids) == self._max_tokens:
            finish_reason = FinishReason.LENGTH
        num_held = len(self._run)
        is_rejection = not self._match_run()
        if not is_rejection and len(self._run) < num_held:
            self.is_conservative = False
        if finish_reason is not None:
            self.is_finished = True
            self._drop_run()
        self._step = None
        self._idle_since_ns = None
        self._is_exhausted = False
        num_dropped, self._num_dropped = self._num_dropped, 0
        num_accepted, is_reuse = min(num_accepted, len(token_ids)), self._is_step_reuse
        verdict = Verdict(
            epoch=self.epoch,
            start_index=start_index,
            token_ids=token_ids,
            num_draft_tokens=0 if is_reuse else step.num_guessed,
            num_accepted_tokens=0 if is_reuse else num_accepted,
            num_reused_tokens=step.num_guessed if is_reuse else 0,
            num_accepted_reused=num_accepted if is_reuse else 0,
            is_rejection=is_rejection,
            num_dropped_tokens=num_dropped,
            finish_reason=finish_reason,
            timing=timing,
            is_conservative=self._is_step_conservative,
            logprobs=tuple(logprobs[: len(token_ids)]),
        )
        self._verdicts.append(verdict)
        return len(token_ids)

    @property
    def _end_index(self) -> int:
        return self._run_start + len(self._run) if self._run else len(self.committed_ids)

    def _enqueue_token(self, index: int, token_id: int) -> None:
        position = index - self._run_start if self._run else 0
        if position < len(self._run):
            if self._run[position] == token_id:
                return
            # A draft that joined in mid-answer drafts other tokens than the lost draft did.
            self._num_dropped += len(self._run) - position
            del self._run[position:]
        is_behind_end = bool(self._run) and self._run[-1] in self._end_token_ids
        if is_behind_end or index >= self._max_tokens:
            self._num_dropped += 1
            return
        if not self._run:
            self._run_start = index
        self._run.append(token_id)

    def _match_run(self) -> bool:
        """Removes settled tokens from the queue; returns False if a token was wrong."""
        while self._run and self._run_start < len(self.committed_ids):
            if self._run[0] != self.committed_ids[self._run_start]:
                self._reject_run(self._run_start)
                return False
            del self._run[0]
            self._run_start += 1
        return True

    def _reject_run(self, index: int) -> None:
        end, settled = len(self.committed_ids), tuple(self.committed_ids[index:])
        if self._run:
            self._broken_run = BrokenRun(self._run[end - self._run_start :], end)
        branch = self._branches.get(index, ())
        is_right = branch[: len(settled)] == settled
        self._branch = BrokenRun(branch[len(settled) :] if is_right else (), end)
        self._drop_run()
        self.epoch += 1
        self.is_conservative = True

    def _drop_run(self) -> None:
        self._num_dropped += len(self._run)
        self._run.clear()
        self._branches.clear()
        self._is_exhausted = False
