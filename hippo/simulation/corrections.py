"""What a draft could prepare while it waits: the likely corrections of its own run.

A draft at its limit idles until the next verdict. It could use that time to say what follows its
second choice at its least certain open places, all of them in one forward: if the target then
settles on just that token, the first block of the new run is there without a step. Preparing takes
the forward's time, and what it overwrites in a cache costs nothing here. At its best it never holds
up a step: what is not ready then is given up at once. A device cannot do that, so a step may have
to wait for it, too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hippo.simulation.traces import Trace, Words
from hippo.speculation.drafter import Drafter
from hippo.speculation.simulator import Simulation, TokenFunction
from hippo.types import Commit

SECOND_CHOICE = 0.6  # of a draft's wrong tokens whose second choice is right, where none is known
MOST_GUESSED = 12  # tokens of the run that a preparing forward tries behind the correction
_SURE = 100.0  # a margin above all others: nobody asked what was second there
_OTHER = 3_000_000  # no token of any trace


@dataclass(frozen=True, slots=True)
class Preparing:
    """That the idle draft prepares the corrections of its ``most`` least certain places (0: none).

    ``second_choice`` is the share of its wrong tokens whose second choice is right, for traces
    that do not say what was second. ``is_held_up``: a step waits for a preparation in progress.
    """

    most: int = 0
    second_choice: float = SECOND_CHOICE
    is_held_up: bool = False


@dataclass(frozen=True, slots=True)
class Runner:
    """The draft's second choice at a place, and how far the first is ahead of it."""

    token_id: int
    margin: float


RunnerFunction = Callable[[Sequence[int]], Runner]


def runner_of(trace: Trace, preparing: Preparing, end_id: int) -> RunnerFunction:
    """Second choices as they were recorded, else drawn; ``end_id`` stands for the last token."""
    words = trace.words
    if words is not None and words.second_ids:
        return _recorded(words, end_id)
    return _drawn(trace, preparing, end_id)


def _recorded(words: Words, end_id: int) -> RunnerFunction:
    ids, last = words.token_ids, len(words.token_ids) - 1

    def runner(history: Sequence[int]) -> Runner:
        place = len(history)
        at = next((k for k, (a, b) in enumerate(zip(history, ids, strict=False)) if a != b), last)
        if place <= at:
            is_end = place == last and words.second_ids[place] == ids[last]
            token_id = end_id if is_end else words.second_ids[place]
            return Runner(token_id, words.margins[place])
        margins = words.branch_margins.get(at, ()) if history[at] == words.draft_ids[at] else ()
        offset = place - at - 1
        return Runner(_OTHER + place, margins[offset] if offset < len(margins) else _SURE)

    return runner


def _drawn(trace: Trace, preparing: Preparing, end_id: int) -> RunnerFunction:
    """Right as often as asked; where the first choice is wrong, its margin is a tenth of what it
    is elsewhere, evenly spread in both cases."""
    rng = random.Random(f"{trace.name} {len(trace.agrees)}")
    draws = [(rng.random(), rng.random()) for _ in trace.agrees]

    def runner(history: Sequence[int]) -> Runner:
        place = len(history)
        if place >= len(draws):
            return Runner(_OTHER + place, _SURE)
        luck, margin = draws[place]
        if trace.agrees[place]:
            return Runner(_OTHER + place, 10 * margin)
        right_id = end_id if place == len(draws) - 1 else place
        return Runner(right_id if luck < preparing.second_choice else _OTHER + place, margin)

    return runner


class ReadyDrafter(Drafter):
    """A drafter that may be given tokens that it has not drafted step by step."""

    def go_on_with(self, token_ids: Sequence[int]) -> None:
        """The run's next tokens, as far as anything is to be drafted."""
        for token_id in token_ids:
            if self.is_exhausted:
                break
            self._ids.append(token_id)

    @property
    def depth(self) -> int:
        """Tokens of the first block of a run; 0 while nothing is to be drafted."""
        pace = self._pace
        if pace.max_ahead == 0:
            return 0
        return max(pace.conservative.min_draft_tokens, pace.block_size)


class PreparingSimulation(Simulation):
    """A simulation in which the idle draft prepares corrections."""

    def __init__(self, *, preparing: Preparing, runner: RunnerFunction, **rest: Any) -> None:
        """``rest`` are the arguments of ``Simulation``."""
        super().__init__(**rest)
        self._preparing = preparing
        self._runner = runner
        self._draft_function: TokenFunction = rest["draft"]
        self._most_behind = MOST_GUESSED if rest.get("max_guessed") else 0
        self._prepared: dict[int, list[int]] = {}  # the correction and what follows, by index
        self._attempt = 0  # counts forwards begun, so that one that was given up is ignored
        self._is_preparing = False

    def _new_drafter(self) -> Drafter:
        self._prepared.clear()
        return ReadyDrafter(**self._drafter_options())

    def _drive_draft(self) -> None:
        super()._drive_draft()
        if self._draft.is_busy:
            if not (self._is_preparing and self._preparing.is_held_up):
                self._attempt += 1
                self._is_preparing = False
        elif isinstance(self._drafter, ReadyDrafter) and not self._is_preparing:
            self._prepare(self._drafter)

    def _prepare(self, drafter: ReadyDrafter) -> None:
        places = self._unready(drafter)
        if not places:
            return
        self._attempt += 1
        self._is_preparing = True
        attempt, ids = self._attempt, list(drafter.ids)
        rows = sum(
            max(1, len(self._prepared.get(place, ()))) + self._num_guessed(place, ids)
            for place in places
        )
        context = self._num_draft_prompt_tokens + len(ids)

        def finish() -> None:
            if attempt != self._attempt or self._drafter is not drafter:
                return  # given up, or the draft is gone
            self._is_preparing = False
            if list(drafter.ids) == ids:
                self._outcome.num_preparations += len(places)
                for place in places:
                    self._go_on(place, ids)
            self._drive_draft()

        duration = self._costs.draft_ns(rows * self._num_sequences, context)
        if self._preparing.is_held_up:
            self._draft.run(duration, finish)
        else:
            self.after(duration, finish)

    def _unready(self, drafter: ReadyDrafter) -> list[int]:
        """The least certain open places at which more could be prepared."""
        ids = drafter.ids
        if not ids or not self._has_drafted:
            return []
        open_places = range(drafter.num_committed, len(ids))
        least = heapq.nsmallest(
            self._preparing.most, open_places, key=lambda place: self._runner(ids[:place]).margin
        )
        return [place for place in least if len(self._prepared.get(place, ())) < drafter.depth + 1]

    def _num_guessed(self, place: int, ids: Sequence[int]) -> int:
        behind = len(ids) - place - max(1, len(self._prepared.get(place, ())))
        return max(0, min(self._most_behind, behind))

    def _go_on(self, place: int, ids: Sequence[int]) -> None:
        """One forward: the draft's next word behind a correction, and more of them for as long as
        it says what it said in its run."""
        before = ids[:place]
        known = self._prepared.setdefault(place, [self._runner(before).token_id])
        for _ in range(self._num_guessed(place, ids) + 1):
            known.append(self._draft_function([*before, *known]))
            end = place + len(known)
            if end > len(ids) or known[-1] != ids[end - 1]:
                break

    def _commit(self, drafter: Drafter, commit: Commit) -> None:
        before = list(drafter.ids)
        super()._commit(drafter, commit)
        settled = drafter.ids[: drafter.num_committed]
        wrong = next(
            (k for k, (a, b) in enumerate(zip(before, settled, strict=False)) if a != b), None
        )
        if wrong is None:
            for place in [place for place in self._prepared if place < len(settled)]:
                del self._prepared[place]
            return
        found = self._prepared.get(wrong, ())
        self._prepared.clear()
        assert isinstance(drafter, ReadyDrafter)
        if found and wrong == len(settled) - 1 and found[0] == settled[wrong]:
            self._outcome.num_ready += 1
            drafter.go_on_with(found[1:])
