"""Recorded answers: what a real draft would say after any tokens, and chains replayed on them.

`python -m bench.drafts.agreement --choices` records for each token of a target's answer the draft's
three likeliest tokens with their chances, and behind each wrong first choice what the draft goes on
with. Off these paths (behind a wrong second or third choice) nothing is recorded and no token can
be right before the draft is back on the answer; there the draft says by chance either what it says
on the answer at the same index, as often as it does behind recorded wrong tokens, or what it
says at a recorded place behind a wrong token, with tokens that are never right.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hippo.lab.simulation.devices import Outcome
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.replay import PolicyChoice
from hippo.lab.simulation.simulator import Simulation
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import MAX_DRAFT_TOKENS

Choices = tuple[tuple[int, float], ...]
"""The draft's likeliest tokens at a place with their chances, the likeliest first."""

_NEVER_RIGHT = 1_000_000  # ids from here on are no tokens of an answer


@dataclass(frozen=True)
class Recording:
    """One recorded answer. ``output`` is the target's, its end token included; ``top`` has the
    draft's choices for each of its tokens, and ``broken`` by index of a wrong first choice the
    choices for the indices behind it."""

    output: tuple[int, ...]
    top: tuple[Choices, ...]
    broken: Mapping[int, tuple[Choices, ...]]
    num_prompt_tokens: int = 0
    num_draft_prompt_tokens: int = 0
    name: str = ""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The answer's last token, if it is an end token."""
        return self.output[-1:] if self.output[-1] not in self.output[:-1] else ()

    @property
    def agreement(self) -> float:
        """Share of the tokens that are the draft's first choice."""
        right = (each[0][0] == token for each, token in zip(self.top, self.output, strict=True))
        return sum(right) / len(self.output)

    def target(self, history: Sequence[int]) -> int:
        """Returns the target's token after the first tokens of its answer."""
        return self.output[min(len(history), len(self.output) - 1)]

    def choices_after(self, history: Sequence[int]) -> Choices:
        """Returns the draft's choices after any tokens."""
        said, right = tuple(history), self.output
        if said == right[: len(said)]:
            return self.choices(len(said), ())
        index, end = (
            0,
            len(said),
        )  # the first wrong token is not before the one, but before the other
        while end - index > 1:
            middle = (index + end) // 2
            if said[index:middle] == right[index:middle]:
                index = middle
            else:
                end = middle
        return self.choices(len(said), said[index:])

    def choices(self, index: int, wrong: tuple[int, ...]) -> Choices:
        """Returns the draft's choices for an index; the tokens before it are the answer's, but for
        those from the first ``wrong`` one on."""
        if index >= len(self.output):
            return ((_NEVER_RIGHT + index, 1.0),)
        if not wrong:
            return self.top[index]
        found = self._off.get((index, wrong))
        if found is None:
            found = self._off[index, wrong] = self._choices_off(index, wrong)
        return found

    def _choices_off(self, index: int, wrong: tuple[int, ...]) -> Choices:
        start = index - len(wrong)
        run = self.broken.get(start, ())
        if len(wrong) <= len(run) and wrong == self._said[start][: len(wrong)]:
            return run[len(wrong) - 1]
        fits, rng = random.Random(f"{start} {wrong[0]}"), random.Random(f"{start} {wrong}")
        if fits.random() < self._fit or not self._off_answer:
            return self.top[index]
        chances = rng.choice(self._off_answer)
        return tuple(
            (_NEVER_RIGHT + 8 * index + place, chance) for place, (_, chance) in enumerate(chances)
        )

    @cached_property
    def _off(self) -> dict[tuple[int, tuple[int, ...]], Choices]:
        return {}  # what was drawn, which is slow

    @cached_property
    def _said(self) -> dict[int, tuple[int, ...]]:
        return {
            index: (self.top[index][0][0], *(each[0][0] for each in run))
            for index, run in self.broken.items()
        }

    @cached_property
    def _off_answer(self) -> list[Choices]:
        return [each for run in self.broken.values() for each in run]

    @cached_property
    def _fit(self) -> float:
        firsts = [(k + 1, run[0][0][0]) for k, run in self.broken.items() if run]
        return (1 + sum(self.output[k] == said for k, said in firsts)) / (2 + len(firsts))


def read_recordings(path: Path) -> list[Recording]:
    """Reads the lines that `python -m bench.drafts.agreement --choices` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_recording(json.loads(line)) for line in lines]


def resized(recording: Recording, num_prompt: int, num_draft_prompt: int) -> Recording:
    """Returns the recording after prompts of other lengths, which only the step times depend on."""
    return replace(
        recording, num_prompt_tokens=num_prompt, num_draft_prompt_tokens=num_draft_prompt
    )


def _recording(entry: Mapping[str, object]) -> Recording:
    def choices(rows: object) -> tuple[Choices, ...]:
        assert isinstance(rows, list)
        return tuple(tuple((token, chance) for token, chance in row) for row in rows)

    output, broken = entry["output"], entry["broken"]
    assert isinstance(output, list) and isinstance(broken, dict)
    lengths = [entry[f"num_{name}prompt_tokens"] for name in ("", "draft_")]
    num_prompt, num_draft_prompt = (int(str(length)) for length in lengths)
    return Recording(
        output=tuple(output), top=choices(entry["top"]),
        broken={int(index): choices(run) for index, run in broken.items()},
        num_prompt_tokens=num_prompt, num_draft_prompt_tokens=num_draft_prompt,
        name=str(entry["clip"]),
    )  # fmt: skip


def replay_chain(
    policy: PolicyChoice,
    recording: Recording,
    machine: Machine,
    *,
    times: PairTimes,
    max_guessed: int = 0,
    seed: int = 0,
) -> Outcome:
    """Simulates one answer with the services' own cores, which see the recorded tokens: branches,
    reused broken runs and (with ``max_guessed``) guesses are the real ones."""

    def second_choice(history: Sequence[int]) -> tuple[int, float]:
        first, *others = recording.choices_after(history)
        if not others:
            return 0, 0.0
        token_id, chance = others[0]
        return token_id, chance / (first[1] + chance) if chance else 0.0

    outcome = Simulation(
        target=recording.target,
        draft=lambda history: recording.choices_after(history)[0][0],
        second_choice=second_choice,
        policy=policy.new_policy(times), costs=machine.costs(seed),
        max_tokens=len(recording.output) + 4 * MAX_DRAFT_TOKENS,
        end_token_ids=recording.end_token_ids, max_guessed=max_guessed,
        num_prompt_tokens=recording.num_prompt_tokens,
        num_draft_prompt_tokens=recording.num_draft_prompt_tokens,
    ).run()  # fmt: skip
    assert tuple(outcome.output_ids) == recording.output, "the answer is the target's"
    return outcome
