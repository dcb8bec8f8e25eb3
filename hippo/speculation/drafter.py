"""The draft's side of one sequence: what to feed next, what to send, when to roll back.

Rollback
--------
The drafter compares each commit with its own tokens. Equal ids continue the run. From the first
difference on, the settled ids replace the drafted ids, and the next step feeds the ids since the
common prefix. If the differing token had been sent, the epoch rises by one, as in the verifier when
the token arrives there (see :mod:`hippo.speculation.verifier`). A commit with a newer epoch means
that the verifier dropped the blocks sent before. The drafter then adopts the epoch and sends the
tokens that still fit again, without drafting them again.

Guesses
-------
A step also feeds a guess of the next tokens (:mod:`hippo.speculation.continuations`). As in a
verification by the target, each row's choice is the next token as long as the guess equals the
choices. No guess reaches the target without this check.

Branches
--------
When the run cannot be drafted further before the next commit, steps extend branches of it
(:mod:`hippo.speculation.branches`). Such a step overwrites the run's rows of the KV cache from the
branch's index on; the run's next step feeds these ids again.
"""

from collections.abc import Collection, Sequence

from hippo.errors import InvalidRequestError
from hippo.speculation.branches import Branches, DraftBranch, Proposal
from hippo.speculation.continuations import BrokenRun, Guesses
from hippo.speculation.core import Step
from hippo.speculation.estimates import DraftTimeMean
from hippo.speculation.sharpness import Sharpness
from hippo.types import Block, Commit, Pace, Timing

FIRST_BLOCK = 4  # a run's first block is due with this many tokens if the target does not wait
_UNTIMED = Timing()
# A step feeds at most this many ids, so that a draft that joins a long answer does not hold up its
# other sequences. A warm-up has tried so many rows, and CUDA graphs have them.
_MOST_FED = 128


class Drafter:
    """Proposes the tokens of one sequence; see :mod:`hippo.speculation.core`.

    The prefill covers the prompt alone; the first steps of a draft that joins in mid-answer feed
    ``committed_ids``. A guess has at most ``max_guessed`` tokens, or three times ``max_guessed`` if
    it comes from a broken run. The notes of ``finish_step`` are each row's proposal: without them
    there are no branches. With the settled tokens, ``sharpness`` learns from them.
    """

    is_finished = False  # always: the gateway ends a draft's stream

    def __init__(
        self,
        *,
        max_tokens: int,
        end_token_ids: Collection[int],
        pace: Pace,
        committed_ids: Sequence[int] = (),
        epoch: int = 0,
        max_guessed: int = 0,
        sharpness: Sharpness | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._pace = pace
        self.ids = list(committed_ids)  # settled, then drafted, from completion index 0
        self._num_committed = len(self.ids)
        self._num_sent = len(self.ids)  # leading ids that are settled or sent
        self._guessed: set[int] = set()  # indices of drafted ids that stood in a guess
        self._sharpness = sharpness
        self._proposals: dict[int, Proposal] = {}  # by index of drafted ids that are not settled
        self._branches = Branches(self._end_token_ids)
        self._num_fed = 0  # leading ids that are in the KV cache
        self._cached: list[int] = []  # the completion ids in the KV cache: the last step's path
        self.epoch = epoch
        self._has_begun = False
        self._is_fresh = True  # nothing of this run was sent yet
        self._guesses = Guesses(max_guessed)
        self._is_from_branch = False  # whether the run began with a branch
        self._step: Step | None = None
        self._step_branch: DraftBranch | None = None
        self._step_mean = DraftTimeMean()
        self._wait_ns = 0  # device idle time since the last block
        self._step_history: list[int] = []

    @property
    def fed_ids(self) -> Sequence[int]:
        return self.ids[: self._num_fed]

    @property
    def is_exhausted(self) -> bool:
        """Whether the run cannot be drafted further before the next commit or pace."""
        return (
            bool(self.ids and self.ids[-1] in self._end_token_ids)
            # The target always gives the last token itself.
            or len(self.ids) >= self._max_tokens - 1
            or len(self.ids) - self._num_committed >= self._pace.max_ahead
        )

    def set_max_tokens(self, max_tokens: int) -> None:
        assert not self._has_begun and max_tokens >= 1
        self._max_tokens = max_tokens

    def receive(self, message: Commit | Pace) -> None:
        if isinstance(message, Commit):
            self.add_commit(message)
        else:
            self._pace = message

    def add_commit(self, commit: Commit) -> None:
        """Compares settled with drafted ids, and rolls back to the first difference.

        May be called while a forward runs, whose tokens are ignored if their history changes.
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
        is_sent_rejected = False
        if end > self._num_committed:
            self._num_committed = end
            is_sent_rejected = self._merge_commit(commit)
            self._num_sent = max(self._num_sent, end)
            self._branches.settle(end)
        if commit.epoch > self.epoch:
            self.epoch = commit.epoch
            self._num_sent = self._num_committed
            self._branches.forget_sent()
            self._is_fresh = True
        elif is_sent_rejected:
            self.epoch += 1

    def set_prompt_text(self, text_ids: Sequence[int]) -> None:
        self._guesses.set_prompt_text(text_ids)

    def begin(
        self, token_id: int, timing: Timing = _UNTIMED, notes: Sequence[Proposal] = ()
    ) -> None:
        """Ignores the token if index 0 is already settled or the pace permits no draft tokens."""
        assert not self._has_begun, "begin is called once"
        self._has_begun = True
        if not self.ids and not self.is_exhausted:
            self._append(token_id, notes[:1])

    def next_step(self, now_ns: int = 0) -> Step | None:
        assert self._step is None, "the last step is not finished"
        path, branch, num_known = self.ids, None, self._num_fed
        if not self._has_begun:
            return None
        if self.is_exhausted:
            branch = self._branch_to_extend()
            if branch is None:
                return None
            path, num_known = path[: branch.start] + branch.ids, min(num_known, branch.start)
        if not path:
            return None
        # The last id must be fed again, because its row's logits give the next token.
        num_fed = min(self._num_cached_of(path, num_known), len(path) - 1)
        known = path[num_fed : num_fed + _MOST_FED]
        end = num_fed + len(known)
        guess = self._make_guess(path, branch) if end == len(path) else ()
        least = max(min(self._num_committed - 1, end), 0)
        self._step = Step(num_fed, (*known, *guess), len(guess), least)
        self._step_history = path[:end]
        self._step_branch = branch
        self._cached = [*self._step_history, *guess]
        self._num_fed = num_fed if branch is None else min(num_fed, branch.start)
        return self._step

    def history(self, step: Step) -> Sequence[int]:
        return self._step_history

    def finish_step(
        self,
        step: Step,
        token_ids: Sequence[int],
        timing: Timing = _UNTIMED,
        notes: Sequence[Proposal] = (),
    ) -> int:
        """Uses no token if commits changed the fed ids since the step began. If commits only
        confirmed ids, the tokens after them are used."""
        assert step is self._step, "not the step in progress"
        assert len(token_ids) == step.num_guessed + 1, "one token for each used row"
        self._step = None
        branch, self._step_branch = self._step_branch, None
        num_drafted = self._take_tokens(step, token_ids, notes)
        self._wait_ns += timing.wait_ns
        if branch is not None:
            return num_drafted + self._extend_branch(branch, step, notes)
        self._step_mean.observe_step(
            timing.forward_ns,
            num_drafted=num_drafted,
            num_settled=len(step.token_ids) - step.num_guessed,
        )
        return num_drafted

    def _take_tokens(self, step: Step, token_ids: Sequence[int], notes: Sequence[Proposal]) -> int:
        """Appends to the run the tokens of the rows whose history it has."""
        ids, num_before = self.ids, len(self.ids)
        end = self._num_cached_of(ids, self._num_fed)
        while True:
            has_next = end == len(ids) >= step.first_index  # the last id's row chose the next id
            # The first choice is taken even if no more draft tokens are wanted, so that it need
            # not be computed again.
            is_wanted = len(ids) == num_before or not self.is_exhausted
            if not (has_next and is_wanted):
                break
            place = end - step.first_index
            self._append(token_ids[place], notes[place : place + 1])
            is_guessed = self._cached[end : end + 1] == ids[-1:]  # so its row is there too
            if is_guessed:
                self._guessed.add(end)
                end += 1
        self._num_fed = end
        return len(ids) - num_before

    def _append(self, token_id: int, notes: Sequence[Proposal]) -> None:
        if notes:
            self._proposals[len(self.ids)] = notes[0]
        self.ids.append(token_id)

    def _num_cached_of(self, path: Sequence[int], known: int) -> int:
        """Returns how many leading ids of a path are in the KV cache; at least ``known`` are."""
        most = min(len(self._cached), len(path))
        return next((k for k in range(known, most) if path[k] != self._cached[k]), max(known, most))

    def _branch_to_extend(self) -> DraftBranch | None:
        if self._branches.num_drafted >= self._pace.max_branched:
            return None
        return self._branches.likeliest(self._proposals, end=self._max_tokens - 1)

    def _extend_branch(self, branch: DraftBranch, step: Step, notes: Sequence[Proposal]) -> int:
        proposal, num_before = self._proposals.get(branch.start), branch.num_drafted
        path = self.ids[: branch.start] + branch.ids
        is_known = proposal is not None and proposal.second_id == branch.ids[0]
        if not is_known or path != self._cached[: len(path)]:
            return 0
        for place, note in enumerate(notes[len(path) - step.first_index :], len(path)):
            branch.append(note)
            if self._cached[place : place + 1] != [note.token_id]:
                break
        self._branches.keep(branch)
        return branch.num_drafted - num_before

    def take_messages(self) -> list[Block]:
        """Returns the next block if it is due.

        A block is due with ``block_size`` ids, or when nothing more can be drafted; so is one of
        branches alone, which are drafted while the run is exhausted. The first block
        of a run is due with as many ids as the conservative limits wait for, because the target
        idles after a rejection, or with a few ids if the target does not wait.
        """
        if not self._has_begun:
            return []
        num_unsent = len(self.ids) - self._num_sent
        num_branched = self._branches.num_unsent
        size = self._pace.block_size
        if self._is_fresh:
            size = self._pace.conservative.min_draft_tokens or min(size, FIRST_BLOCK)
        is_exhausted = self.is_exhausted
        is_due = num_unsent > 0 and (is_exhausted or num_unsent >= size)
        if is_exhausted and num_branched:
            is_due = is_due or num_branched >= size or self._branch_to_extend() is None
        if not is_due:
            return []
        block = Block(
            epoch=self.epoch,
            start_index=self._num_sent,
            token_ids=tuple(self.ids[self._num_sent :]),
            is_exhausted=is_exhausted,
            step_ns=self._step_mean.token_ns,
            wait_ns=self._wait_ns,
            guessed_places=tuple(
                place for place in range(num_unsent) if self._num_sent + place in self._guessed
            ),
            branches=self._branches.take_unsent(),
            is_from_branch=self._is_from_branch and self._is_fresh,
        )
        self._num_sent = len(self.ids)
        self._is_fresh = False
        self._wait_ns = 0
        return [block]

    def _make_guess(self, path: Sequence[int], branch: DraftBranch | None) -> tuple[int, ...]:
        num_left = self._num_committed + self._pace.max_ahead - len(path)
        if branch is not None:
            num_left = self._pace.max_branched - self._branches.num_drafted
        most = min(num_left, self._max_tokens - 1 - len(path)) - 1
        if branch is None:
            guess = self._guesses.after(path, most)
        else:  # the run goes on after the second choice as after the first
            start = branch.start + 1
            guess = self._guesses.of_run(BrokenRun(self.ids[start:], start), path, most)
        ends = [place for place, each in enumerate(guess) if each in self._end_token_ids]
        return guess[: min(ends, default=len(guess))]

    def _merge_commit(self, commit: Commit) -> bool:
        """Takes the settled ids into the run; returns whether they differ from a sent token."""
        for offset, token_id in enumerate(commit.token_ids):
            index = commit.start_index + offset
            proposal = self._proposals.pop(index, None)
            if proposal is not None and self._sharpness is not None:
                self._sharpness.observe_choices(proposal.choices, token_id)
            if index < len(self.ids) and self.ids[index] != token_id:
                is_sent = index < self._num_sent
                end = commit.start_index + len(commit.token_ids)
                self._guesses.break_run(index, rest=self.ids[end:], end=end)
                self._guessed.difference_update(range(index, len(self.ids)))
                self._proposals.clear()
                del self.ids[index:]
                self.ids.extend(commit.token_ids[offset:])
                self._enter_branch(index)
                self._num_fed = min(self._num_fed, index)
                self._num_sent = min(self._num_sent, index)
                self._is_fresh = True
                return is_sent
            if index == len(self.ids):
                self.ids.append(token_id)
        return False

    def _enter_branch(self, start: int) -> None:
        """Goes on with the branch of the rejected token, if the settled ids begin it."""
        branch = self._branches.take(start)
        settled = self.ids[start:]
        self._is_from_branch = False
        if branch is not None and branch.ids[: len(settled)] == settled:
            for proposal in branch.proposals[len(settled) - 1 :]:
                self._append(proposal.token_id, [proposal])
                self._is_from_branch = True
