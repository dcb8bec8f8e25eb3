"""Latency of one question at a time; all systems take turns, so machine drift affects all alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from hippo.client.answers import Answer
from hippo.client.requests import Question, RequestForm
from hippo.client.server import Connection, Server

TARGET_ONLY = "target-only"
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class System:
    """A measured system: its name, and the `speculative` object of its requests."""

    name: str
    speculative: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One system's answer to a question, with the target-only baseline of that question."""

    clip: str  # the question's name
    system: str
    temperature: float
    answer: Answer
    baseline_decode_s: float
    baseline_end_to_end_s: float
    baseline_ids: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the answer equals the target-only answer, token for token."""
        return self.answer.token_ids == self.baseline_ids

    @property
    def decode_speedup(self) -> float:
        """Target-only decode time divided by this answer's; 1 if the answer has one token."""
        return _ratio(self.baseline_decode_s, self.answer.decode_s)

    @property
    def end_to_end_speedup(self) -> float:
        """Target-only time from request to last token, divided by this answer's."""
        return _ratio(self.baseline_end_to_end_s, self.answer.end_to_end_s)

    @property
    def first_token_share(self) -> float:
        """This answer's time to the first piece of text over target-only's."""
        return _ratio(self.answer.ttft_s, self.baseline_end_to_end_s - self.baseline_decode_s)

    @property
    def figures(self) -> Mapping[str, Any]:
        return self.answer.figures

    def as_dict(self) -> dict[str, Any]:
        own = ("clip", "system", "temperature", "decode_speedup", "end_to_end_speedup", "is_equal")
        of_answer = ("num_tokens", "ttft_s", "decode_s", "end_to_end_s")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.answer, name) for name in of_answer},
            "figures": dict(self.figures),
        }


def num_answers(systems: Sequence[System], num_questions: int) -> int:
    """Returns the number of records that ``measure`` yields."""
    return num_questions * (2 + sum(system.name != TARGET_ONLY for system in systems))


def measure(
    server: Server,
    form: RequestForm,
    questions: Sequence[Question],
    systems: Sequence[System],
    *,
    num_repeats: int = 1,
) -> Iterator[Record]:
    """Yields records of a hippo gateway, question by question.

    Target-only runs before and after the other systems on each question. The baseline is the mean
    of both runs, and the speedups of both (system "target-only", two records per question) show the
    drift of the machine. All systems run ``num_repeats`` times, in turns, so that a slow period of
    the machine affects all alike; of each, the answer of median decode time counts (or one with
    other tokens than the first run's). Raises HippoError as ``Connection.ask`` does.
    """
    off = System(TARGET_ONLY, {"policy": "off"})
    others = [system for system in systems if system.name != TARGET_ONLY]
    with closing(server.connect()) as connection:

        def answers(question: Question, order: Sequence[System]) -> list[Answer]:
            requests = [form.request(question, system.speculative) for system in order]
            return [connection.ask(request.body()) for request in requests]

        warm_up(connection, form, questions[0], (off, *others))
        for number, question in enumerate(questions):
            order = [off, *turned(others, number), off]
            rounds = [answers(question, order) for _ in range(num_repeats)]
            typical = [_typical(runs) for runs in zip(*rounds, strict=True)]
            before, after = typical[0], typical[-1]
            for system, answer in zip(order, typical, strict=True):
                yield Record(
                    clip=question.name,
                    system=system.name,
                    temperature=form.temperature,
                    answer=answer,
                    baseline_decode_s=(before.decode_s + after.decode_s) / 2,
                    baseline_end_to_end_s=(before.end_to_end_s + after.end_to_end_s) / 2,
                    baseline_ids=before.token_ids,
                )


def measure_alone(
    server: Server, form: RequestForm, questions: Sequence[Question]
) -> Iterator[Answer]:
    """Yields the answers of any server one by one, after asking the first question to warm up."""
    with closing(server.connect()) as connection:
        connection.ask(form.request(questions[0]).body())
        for question in questions:
            yield connection.ask(form.request(question).body())


def warm_up(
    connection: Connection, form: RequestForm, question: Question, systems: Sequence[System]
) -> None:
    short = replace(form, max_tokens=min(_WARM_UP_TOKENS, form.max_tokens))
    for system in systems:
        connection.ask(short.request(question, system.speculative).body())


def turned(systems: Sequence[System], number: int) -> list[System]:
    """Returns the systems in the order in which question ``number`` is asked of them."""
    shift = number % len(systems) if systems else 0
    return [*systems[shift:], *systems[:shift]]


def _typical(answers: Sequence[Answer]) -> Answer:
    """Returns an answer whose tokens differ from the first's, else the median by decode time."""
    for answer in answers:
        if answer.token_ids != answers[0].token_ids:
            return answer
    return sorted(answers, key=lambda answer: answer.decode_s)[len(answers) // 2]


def _ratio(baseline_s: float, seconds: float) -> float:
    return baseline_s / seconds if baseline_s and seconds else 1.0
