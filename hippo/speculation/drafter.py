"""The draft's side of one sequence: what to feed next, what to send, when to roll back.

Rolling back
------------
A commit is compared with what was drafted. Equal ids keep the run alive. At the first difference
the ids from there on are replaced by the settled ones, and the next step feeds all ids since the
common prefix in one forward. If the differing token had been sent, the epoch rises by one, as it
does at the verifier when it sees that token (the argument is in
:mod:`hippo.speculation.verifier`). A commit that bears a newer epoch means that the verifier
dropped what was sent before it: the drafter takes the epoch over and sends again, without
drafting again, whatever of it still fits.

Guesses
-------
Rows are cheap, so a step also feeds a guess at the tokens to come, and the draft's own choices tell
how much of it is right: as in a verification, each row's choice is the next token for as long as
the guess equals the choices. After a rollback the guess is what the broken run said behind the
place that was wrong, for as long as that fits; otherwise what followed the same words before
(:mod:`hippo.speculation.continuations`). A guess never reaches the target unchecked.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from hippo.errors import InvalidRequestError
from hippo.speculation.continuations import BrokenRun, Continuations
from hippo.speculation.core import Step
from hippo.types import Block, Commit, Pace, Timing, TokenLogprobs

# A broken run is right more often than a guess, so as many times its length is tried.
_BROKEN_RUN = 3
_FIRST_BLOCK = 4  # tokens of a run at most before the first are sent
_UNTIMED = Timing()
_LOOK_BACK = 8  # steps
_OUTLIER = 3.0  # one step counts as so many times the mean at most: a stall is no step time
_CATCHING_UP = 8  # settled ids in a step that say that it did more than draft


class Drafter:
    """Proposes the tokens of one sequence; a :class:`hippo.speculation.core.Core`.

    The prefill is of the prompt alone, without completion ids: a draft that joins in mid-answer
    (``committed_ids``) is told by ``next_step`` to feed them. A step guesses at most
    ``max_guessed`` tokens, or three times as many of a broken run.
    """

    is_finished = False  # never: the gateway ends a draft's stream

    def __init__(
        self,
        *,
        max_tokens: int,
        end_token_ids: Collection[int],
        pace: Pace,
        committed_ids: Sequence[int] = (),
        epoch: int = 0,
        max_guessed: int = 0,
    ) -> None:
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._pace = pace
        self._ids = list(committed_ids)  # settled, then drafted
        self._num_committed = len(self._ids)
        self._num_sent = len(self._ids)  # settled or sent: all before the first unsent id
        self._num_fed = 0  # leading ids that are in the cache
        self.epoch = epoch
        self._has_begun = False
        self._is_fresh = True  # nothing of this run was sent since it began
        self._max_guessed = max_guessed
        self._continuations = Continuations()
        self._broken_run = BrokenRun()
        self._step: Step | None = None
        self._step_mean = DraftTimeMean()
        self._wait_ns = 0  # of the device, since the last block
        self._step_history: list[int] = []

    @property
    def ids(self) -> Sequence[int]:
        """Settled ids, then drafted ones, from completion index 0; a live view."""
        return self._ids

    @property
    def fed_ids(self) -> Sequence[int]:
        """The leading ids that are in the cache; a step in progress may write behind them."""
        return self._ids[: self._num_fed]

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing can be drafted before the next commit or pace."""
        return (
            bool(self._ids and self._ids[-1] in self._end_token_ids)
            # The target always gives the last token itself.
            or len(self._ids) >= self._max_tokens - 1
            or len(self._ids) - self._num_committed >= self._pace.max_ahead
        )

    def set_max_tokens(self, max_tokens: int) -> None:
        assert not self._has_begun and max_tokens >= 1
        self._max_tokens = max_tokens

    def set_pace(self, pace: Pace) -> None:
        """Takes effect at the next ``next_step`` and ``take_messages``."""
        self._pace = pace

    def receive(self, message: Commit | Pace) -> None:
        if isinstance(message, Commit):
            self.add_commit(message)
        else:
            self.set_pace(message)

    def add_commit(self, commit: Commit) -> None:
        """Compares settled ids with what was drafted, and rolls back where they differ.

        Any time, also while a forward runs: its token is then ignored if its history changed.
        Raises InvalidRequestError for a commit after a gap or beyond ``max_tokens``.
        """
        if commit.start_index > self._num_committed:
            raise InvalidRequestError(
                f"commit starts at index {commit.start_index}, but only {self._num_committed} ids "
                "are settled; commits must follow each other without a gap"
            )
        end = commit.start_index + len(commit.token_ids)
        if end > self._max_tokens:
            raise InvalidRequestError(
                f"commit reaches {end} tokens, but max_tokens is {self._max_tokens}",
                param="commit.token_ids",
            )
        if end > self._num_committed:
            self._num_committed = end
            is_sent_rejected = self._compare(commit)
            self._num_sent = max(self._num_sent, end)
        else:
            is_sent_rejected = False
        if commit.epoch > self.epoch:
            self.epoch = commit.epoch
            self._num_sent = self._num_committed
            self._is_fresh = True
        elif is_sent_rejected:
            self.epoch += 1

    def read_text(self, text_ids: Sequence[int]) -> None:
        """Takes the prompt's text, to guess from."""
        if self._max_guessed:
            self._continuations = Continuations(text_ids)

    def begin(
        self, token_id: int, timing: Timing = _UNTIMED, logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """The token is ignored if index 0 is settled already, or if nothing is to be drafted."""
        assert not self._has_begun, "begin is called once"
        self._has_begun = True
        if not self._ids and not self.is_exhausted:
            self._ids.append(token_id)

    def next_step(self, now_ns: int = 0) -> Step | None:
        assert self._step is None, "the last step is not finished"
        if not self._has_begun or self.is_exhausted or self._num_fed == len(self._ids):
            return None
        guess = self._guess()
        known = self._ids[self._num_fed :]
        self._step = Step(self._num_fed, (*known, *guess), len(guess))
        self._step_history = self._ids.copy()
        return self._step

    def history(self, step: Step) -> Sequence[int]:
        return self._step_history

    def finish_step(
        self,
        step: Step,
        token_ids: Sequence[int],
        timing: Timing = _UNTIMED,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> int:
        """No token is of use if commits since the step began changed what it was fed; commits that
        only went on along it leave what comes behind them."""
        assert step is self._step, "not the step in progress"
        assert len(token_ids) == step.num_guessed + 1, "a token for each row of use"
        self._step = None
        num_drafted = self._take_tokens(step, token_ids)
        self._wait_ns += timing.wait_ns
        self._step_mean.observe(
            timing.forward_ns,
            num_drafted=num_drafted,
            num_settled=len(step.token_ids) - step.num_guessed,
        )
        return num_drafted

    def _take_tokens(self, step: Step, token_ids: Sequence[int]) -> int:
        if self._num_fed != step.start_index:  # rolled back to before all that was fed
            return 0
        ids, num_before = self._ids, len(self._ids)
        pairs = zip(ids[step.start_index :], step.token_ids, strict=False)
        num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        # While all ids are fed, the row of the last one has chosen the next. The first choice is
        # taken even if nothing is to be drafted any more, so that it need not be made again.
        while (end := step.start_index + num_right) == len(ids) and (
            len(ids) == num_before or not self.is_exhausted
        ):
            ids.append(token_ids[end - step.first_index])
            if num_right < len(step.token_ids) and step.token_ids[num_right] == ids[-1]:
                num_right += 1
        # The last id is always fed again: only its row's logits tell what follows.
        self._num_fed = min(end, len(ids) - 1)
        return len(ids) - num_before

    def take_messages(self) -> list[Block]:
        """The next block, if one is due.

        Due: ``block_size`` ids; as the first block of a run, just as many as the conservative
        limits wait for, because the target idles after a rejection, or a few where it goes on
        alone; whatever there is when nothing further can be drafted.
        """
        num_unsent = len(self._ids) - self._num_sent if self._has_begun else 0
        size = self._pace.block_size
        if self._is_fresh:
            size = self._pace.conservative.min_draft_tokens or min(size, _FIRST_BLOCK)
        is_exhausted = self.is_exhausted
        if num_unsent < 1 or not (is_exhausted or num_unsent >= size):
            return []
        block = Block(
            epoch=self.epoch,
            start_index=self._num_sent,
            token_ids=tuple(self._ids[self._num_sent :]),
            is_exhausted=is_exhausted,
            step_ns=self._step_mean.token_ns,
            wait_ns=self._wait_ns,
        )
        self._num_sent = len(self._ids)
        self._is_fresh = False
        self._wait_ns = 0
        return [block]

    def _guess(self) -> tuple[int, ...]:
        """What may follow the ids so far, within what is to be drafted at all."""
        ends = (self._max_tokens - 1, self._num_committed + self._pace.max_ahead)
        most = min(_BROKEN_RUN * self._max_guessed, min(ends) - len(self._ids) - 1)
        if most < 1:
            return ()
        guess = self._broken_run.after(self._ids, most)
        if not guess:
            guess = self._continuations.after(self._ids, min(most, self._max_guessed))
        for place, token_id in enumerate(guess):
            if token_id in self._end_token_ids:
                return guess[:place]  # nothing comes behind it
        return guess

    def _compare(self, commit: Commit) -> bool:
        """Makes the settled ids part of the run; whether a token that was sent differs."""
        for offset, token_id in enumerate(commit.token_ids):
            index = commit.start_index + offset
            if index < len(self._ids) and self._ids[index] != token_id:
                is_sent = index < self._num_sent
                end = commit.start_index + len(commit.token_ids)
                self._broken_run = BrokenRun(self._ids[end:], end)
                self._continuations.roll_back(index)
                del self._ids[index:]
                self._ids.extend(commit.token_ids[offset:])
                self._num_fed = min(self._num_fed, index)
                self._num_sent = min(self._num_sent, index)
                self._is_fresh = True
                return is_sent
            if index == len(self._ids):
                self._ids.append(token_id)
        return False


class DraftTimeMean:
    """Running mean over the last steps of one sequence; knows no clock.

    A step that feeds many settled ids (after a rest, or a draft that joins in mid-answer) says
    nothing about drafting, and what was before it may have changed: the mean begins anew.
    """

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._mean_drafted = 0.0  # tokens of a step

    @property
    def token_ns(self) -> int:
        """Device time of a drafted token; 0 before the first."""
        return round(self._mean_ns / self._mean_drafted) if self._mean_drafted else 0

    def observe(self, duration_ns: float, *, num_drafted: int, num_settled: int) -> None:
        """A step gave so many tokens and was fed so many settled ids."""
        if num_settled > _CATCHING_UP:
            self._mean_ns = self._mean_drafted = 0.0
        elif num_drafted:
            if not self._mean_drafted:
                self._mean_ns, self._mean_drafted = duration_ns, num_drafted
                return
            counted_ns = min(duration_ns, _OUTLIER * self._mean_ns)
            self._mean_ns += (counted_ns - self._mean_ns) / _LOOK_BACK
            self._mean_drafted += (num_drafted - self._mean_drafted) / _LOOK_BACK
