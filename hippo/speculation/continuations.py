"""Guesses without a model, from earlier occurrences of the last tokens and from rejected runs.

The draft model verifies a guess in its next forward, as the target verifies draft tokens. Where a
text repeats itself, one draft forward therefore yields several tokens. This is prompt lookup
decoding (Saxena 2023), applied to the draft model instead of the target.
"""

from collections.abc import Sequence

_LONGEST_MATCH = 3  # tokens; shorter matches are tried after longer ones
_MOST_PROMPT_TOKENS = 4096  # only this many last tokens of a prompt are indexed
_FOUND_AGAIN = 2  # last tokens of the answer that are searched for in a run
# A broken run is right more often than a continuation, so its guess may be longer by this factor.
_BROKEN_RUN = 3


class Continuations:
    """Finds what followed earlier occurrences of the last tokens, in a prompt and its answer.

    ``prompt_ids`` are the ids of the prompt's text, without visual tokens. Each token costs at most
    three dictionary entries.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # n-gram: index in _ids of the token after it
        self._append_ids(prompt_ids[-_MOST_PROMPT_TOKENS:])
        self._num_prompt = len(self._ids)

    def guess_after(self, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns at most ``most`` tokens that may follow the answer ``output_ids``; often none.

        The longest match wins, and the last one of equally long matches. ``output_ids`` must begin
        with the ids of the last call, except those that ``roll_back`` removed since.
        """
        if most < 1:
            return ()
        self._append_ids(output_ids[len(self._ids) - self._num_prompt :])
        ids = self._ids
        for length in range(min(_LONGEST_MATCH, len(ids)), 0, -1):
            suffix = tuple(ids[-length:])
            place = self._places.get(suffix, len(ids))
            # After a rollback an entry may point behind other tokens than its own.
            if place < len(ids) and tuple(ids[place - length : place]) == suffix:
                return tuple(ids[place : place + most])
        return ()

    def roll_back(self, num_output_ids: int) -> None:
        del self._ids[self._num_prompt + num_output_ids :]

    def _append_ids(self, token_ids: Sequence[int]) -> None:
        ids = self._ids
        for token_id in token_ids:
            end = len(ids)
            for length in range(1, min(_LONGEST_MATCH, end) + 1):
                self._places[tuple(ids[end - length :])] = end
            ids.append(token_id)


class BrokenRun:
    """The tokens that a rejected run had after its wrong token; they often still fit.

    ``token_ids`` are assumed to follow the first ``start_index`` ids of the answer. If the answer
    has a word more or less than the run, the last two tokens of the answer are searched for in the
    run, and the guess continues after them.
    """

    def __init__(self, token_ids: Sequence[int] = (), start_index: int = 0) -> None:
        self._ids = list(token_ids)
        self._start_index = start_index  # answer index of the run's first token

    def guess_after(self, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns at most ``most`` tokens that may follow the answer ``output_ids``, which has at
        least ``start_index`` ids; none if the run has neither the answer's last token at the same
        index nor its last two tokens elsewhere."""
        place = len(output_ids) - self._start_index
        if place and self._ids[place - 1 : place] != [output_ids[-1]]:
            last_ids = list(output_ids[-_FOUND_AGAIN:])
            length = len(last_ids)
            ends = range(len(self._ids) - 1, length - 1, -1)
            place = next((end for end in ends if self._ids[end - length : end] == last_ids), 0)
            if not place:
                return ()
            self._start_index = len(output_ids) - place
        return tuple(self._ids[place : place + most])


class Guesses:
    """A draft's guesses: the rest of its last broken run, or else a continuation.

    A guess has at most ``most`` tokens (0: there are none), and three times as many if it is of a
    broken run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._continuations = Continuations()
        self._broken_run = BrokenRun()

    def set_prompt_text(self, text_ids: Sequence[int]) -> None:
        """Sets the ids of the prompt's text, in which continuations are looked up."""
        if self._most:
            self._continuations = Continuations(text_ids)

    def break_run(self, index: int, *, rest: Sequence[int], end: int) -> None:
        """Ends the run, whose token at ``index`` is wrong, and which had ``rest`` from the index
        ``end`` on."""
        self._broken_run = BrokenRun(rest, end)
        self._continuations.roll_back(index)

    def after(self, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns at most ``most`` tokens that may follow ``output_ids``; often none."""
        guess = self.of_run(self._broken_run, output_ids, most)
        return guess or self._continuations.guess_after(output_ids, min(most, self._most))

    def of_run(self, run: BrokenRun, output_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Returns at most ``most`` tokens of a run that may follow ``output_ids``; often none."""
        most = min(most, _BROKEN_RUN * self._most)
        return run.guess_after(output_ids, most) if most >= 1 else ()
