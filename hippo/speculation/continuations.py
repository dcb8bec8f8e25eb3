"""Guesses without a model: what followed the same words before, and what a rejected run said next.

The draft model checks a guess in the forward that it makes anyway, as the target checks the
draft's tokens, so several of its tokens come of one forward where the text repeats itself (prompt
lookup decoding, Saxena 2023, here one level down).
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_MATCH = 3  # words are matched by this many tokens at most, by fewer where that fails
_MOST_PROMPT_TOKENS = 4096  # the last ones of a prompt that are looked at
_FOUND_AGAIN = 2  # tokens by which the answer is found in a run whose places no longer fit


class Continuations:
    """What followed the same tokens before, in one sequence's prompt and answer.

    ``prompt_ids`` are the prompt's text, without visual tokens. A token costs a few dictionary
    entries, whatever the length of the text.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # where what followed a match stands
        self._extend(prompt_ids[-_MOST_PROMPT_TOKENS:])
        self._num_prompt = len(self._ids)

    def after(self, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens that may follow the answer so far; often none.

        Of several matches the longest, and of these the last, is taken. ``output_ids`` begin with
        those of the last call, unless they were rolled back since.
        """
        if most < 1:
            return ()
        self._extend(output_ids[len(self._ids) - self._num_prompt :])
        ids = self._ids
        for length in range(min(_LONGEST_MATCH, len(ids)), 0, -1):
            suffix = tuple(ids[-length:])
            place = self._places.get(suffix, len(ids))
            # Behind a rollback an entry may point at other tokens than those it was made of.
            if place < len(ids) and tuple(ids[place - length : place]) == suffix:
                return tuple(ids[place : place + most])
        return ()

    def roll_back(self, num_output_ids: int) -> None:
        """Forgets all of the answer but so many of its first tokens."""
        del self._ids[self._num_prompt + num_output_ids :]

    def _extend(self, token_ids: Sequence[int]) -> None:
        ids = self._ids
        for token_id in token_ids:
            end = len(ids)
            for length in range(1, min(_LONGEST_MATCH, end) + 1):
                self._places[tuple(ids[end - length :])] = end
            ids.append(token_id)


class BrokenRun:
    """What a rejected run said behind the token that was wrong, which often still fits.

    ``token_ids`` are taken to follow the first ``start_index`` ids of the answer. Where the answer
    says something else instead, nothing follows; where it says a word more or less, its last two
    tokens, wherever they stand in the run, say where it goes on.
    """

    def __init__(self, token_ids: Sequence[int] = (), start_index: int = 0) -> None:
        self._ids = list(token_ids)
        self._start_index = start_index  # of the answer, at which the run stands now

    def after(self, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens that may follow the answer, of ``start_index`` ids or more; none
        where the run has neither its last token at this place nor its last two at another."""
        place = len(output_ids) - self._start_index
        if place and self._ids[place - 1 : place] != [output_ids[-1]]:
            place = self._place_of(output_ids[-_FOUND_AGAIN:])
            if not place:
                return ()
            self._start_index = len(output_ids) - place
        return tuple(self._ids[place : place + most])

    def _place_of(self, last_ids: Sequence[int]) -> int:
        """Where the run goes on behind the last occurrence of ``last_ids``; 0: there is none."""
        suffix, length = list(last_ids), len(last_ids)
        places = range(len(self._ids) - 1, length - 1, -1)
        return next((end for end in places if self._ids[end - length : end] == suffix), 0)
