"""One run of ``hippo bench``: asks the server, and prints tables and plots of the results."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.client import tables
from hippo.client.answers import Answer
from hippo.client.figures import distributions, notes_on, summarise, summarise_alone
from hippo.client.latency import TARGET_ONLY, System, measure, measure_alone, num_answers
from hippo.client.requests import Question, RequestForm, probe
from hippo.client.server import Server
from hippo.errors import ForbiddenError, HippoError, InvalidRequestError, NotFoundError
from hippo.lab.benchmark.load import ClosedLoop, LoadRun
from hippo.lab.benchmark.load_figures import summarise_load
from hippo.lab.benchmark.plots import draw_answers, draw_load, draw_speedups
from hippo.lab.commands.bench_questions import QuestionFile, QuestionRun

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A measurement to run. ``policies`` is None if the user named no policy.

    For a load, one of ``requests`` and ``seconds`` is set.
    """

    server: Server
    form: RequestForm  # its model is "" if the user named none
    questions: tuple[Question, ...]
    policies: tuple[System, ...] | None
    rounds: int
    concurrency: tuple[int, ...]
    requests: int | None  # per load
    seconds: float | None  # per load
    plot: Path | None
    file: QuestionFile | None = None  # then its questions are asked, each once

    @property
    def asked(self) -> list[Question]:
        """The questions of all rounds, each with a different seed."""
        return [
            replace(question, seed=question.seed + number)
            for number, question in enumerate(self.questions * self.rounds)
        ]

    @property
    def how(self) -> str:
        """The sampling parameters, for titles."""
        return f"T={self.form.temperature:g}, up to {self.form.max_tokens} tokens"


class Bench:
    """One run of the command: prints results to ``console``, progress bars to ``progress``."""

    def __init__(self, plan: Plan, console: Console, progress: Console) -> None:
        self._plan = plan
        self._console = console
        self._progress = progress
        self._form = plan.form

    def run(self) -> Document:
        """Measures; returns the results for JSON. Raises HippoError if the server fails, and
        InvalidRequestError for policies on a server that is not hippo."""
        plan = self._plan
        form = self._form = self._find_form()
        if plan.policies is not None and not form.is_hippo:
            raise InvalidRequestError(
                f"--policies is for a hippo gateway, and {plan.server.url} is another server"
            )
        measured: Document
        if plan.file is not None:
            run = QuestionRun(
                plan.file, plan.server, form, self._systems(), self._console, self._progress
            )
            measured = {"questions": run.run()}
        elif plan.concurrency:
            measured = {"load": self._measure_load()}
        elif form.is_hippo:
            measured = {"latency": self._measure_side_by_side()}
        else:
            measured = {"latency": self._measure_alone()}
        if plan.plot is not None:
            self.say(f"written to {plan.plot}")
        return {
            "url": plan.server.url,
            "model": form.model,
            "is_hippo": form.is_hippo,
            "fields": list(form.optional),
            "questions": [question.name for question in plan.questions],
            **measured,
        }

    def say(self, text: str) -> None:
        """Prints a line of plain text."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _find_form(self) -> RequestForm:
        """Probes which request fields the server takes; errors are raised with advice added."""
        plan = self._plan
        try:
            model = plan.form.model or self._only_model(plan.server.models())
            with (
                closing(plan.server.connect()) as connection,
                self._progress.status(f"asking {plan.server.url} ..."),
            ):
                return probe(connection, plan.questions[0], replace(plan.form, model=model))
        except ForbiddenError as error:
            advice = "give a key in HIPPO_API_KEY" if plan.server.api_key is None else "another key"
            raise ForbiddenError(f"{error.message} ({advice}?)") from None
        except NotFoundError as error:
            if not plan.form.model:
                raise
            raise NotFoundError(f"{error.message} ({self._served_models()})") from None

    def _only_model(self, names: Sequence[str]) -> str:
        if not names:
            raise NotFoundError(f"{self._plan.server.url} serves no model")
        if len(names) > 1:
            self.say(f"{names[0]} of {len(names)} models; --model chooses another")
        return names[0]

    def _served_models(self) -> str:
        try:
            return "it serves " + ", ".join(self._plan.server.models())
        except HippoError:
            return "and it does not tell what it serves"

    def _systems(self) -> Sequence[System]:
        """Returns the systems to measure side by side with target-only."""
        return self._plan.policies or (System("adaptive", {"policy": "adaptive"}),)

    def _measure_side_by_side(self) -> Document:
        """Measures target-only and the policies in turn on a hippo gateway."""
        plan, systems = self._plan, self._systems()
        records = tables.watched(
            measure(plan.server, self._form, plan.asked, systems),
            self._progress,
            title="side by side",
            total=num_answers(systems, len(plan.asked)),
        )
        rows = summarise(records)
        title = f"{self._form.model} at {plan.server.url}, {len(plan.asked)} questions, {plan.how}"
        self._console.print(tables.latency_table(title, rows))
        for note in notes_on(records):
            self.say(note)
        result: Document = {"summary": rows, "records": [each.as_dict() for each in records]}
        if plan.plot is not None:
            draw_speedups(rows, plan.plot, title=title)
        return result

    def _measure_alone(self) -> Document:
        """Measures the answers of any server, one after another."""
        plan, name = self._plan, self._form.model
        answers = tables.watched(
            measure_alone(plan.server, self._form, plan.asked),
            self._progress,
            title="one at a time",
            total=len(plan.asked),
        )
        row = summarise_alone(name, answers)
        title = f"{name} at {plan.server.url}, {len(answers)} questions, {plan.how}"
        self._console.print(tables.alone_table(title, row))
        self._print_counted_by(row["counted_by"])
        if plan.plot is not None:
            draw_answers(name, distributions(answers), plan.plot, title=title)
        records = [_record(*pair) for pair in zip(plan.asked, answers, strict=True)]
        return {"summary": [row], "records": records}

    def _measure_load(self) -> list[Document]:
        """Measures every number of clients with every system in turn."""
        plan = self._plan
        systems = plan.policies or (
            System(TARGET_ONLY, {"policy": "off"}),
            System("adaptive", {"policy": "adaptive"}),
        )
        if not self._form.is_hippo:
            systems = (System(self._form.model, {}),)
        references = self._references() if self._form.is_hippo else {}
        lines: list[Document] = []
        for num_clients, system in product(plan.concurrency, systems):
            run = self._closed_loop(num_clients, system)
            line = summarise_load(run, references)
            lines.append({"system": system.name, "num_clients": num_clients, **line})
        title = f"{self._form.model} at {plan.server.url}, closed loop, {plan.how}"
        self._console.print(tables.load_table(title, lines))
        for line in lines:
            where = f"{line['system']}, {line['num_clients']} clients"
            for message, count in line["errors"].items():
                self.say(f"{where}: {count} x {message}")
            if line["num_answers"] < 2 * line["num_clients"]:
                self.say(f"{where}: few answers to judge by; more --seconds or --requests")
        self._print_counted_by(sorted({each for line in lines for each in line["counted_by"]}))
        if plan.plot is not None:
            draw_load(lines, plan.plot, title=title)
        return lines

    def _references(self) -> dict[int, tuple[int, ...]]:
        """Returns the target-only token ids by question index, from requests sent one at a time."""
        with closing(self._plan.server.connect()) as connection:
            found = tables.watched(
                (
                    connection.ask(self._form.request(question, {"policy": "off"}).body())
                    for question in self._plan.asked
                ),
                self._progress,
                title="target-only, one at a time",
                total=len(self._plan.asked),
            )
        return {index: answer.token_ids for index, answer in enumerate(found)}

    def _closed_loop(self, num_clients: int, system: System) -> LoadRun:
        plan = self._plan
        requests = [self._form.request(each, system.speculative) for each in plan.asked]
        start_s: list[float] = []
        total = plan.seconds if plan.requests is None else num_clients + plan.requests
        with tables.progress_bar(self._progress) as progress:
            task = progress.add_task(f"{system.name}, {num_clients} clients", total=total)

            def advance() -> None:
                if plan.requests is not None:
                    progress.advance(task)
                elif start_s:
                    seconds = time.perf_counter() - start_s[0]
                    progress.update(task, completed=min(int(seconds), total or 0))

            return ClosedLoop(
                [plan.server],
                requests,
                num_clients=num_clients,
                num_answers=plan.requests,
                seconds=plan.seconds,
                tolerates_errors=True,
                on_start=lambda: start_s.append(time.perf_counter()),
                on_answer=advance,
            ).run()

    def _print_counted_by(self, counted_by: Sequence[str]) -> None:
        if "pieces" in counted_by:
            self.say(
                "the server does not tell how many tokens an answer has: its pieces of text were "
                "counted, which may hold several tokens"
            )


def _record(question: Question, answer: Answer) -> Document:
    return {
        "clip": question.name,
        "num_tokens": answer.num_tokens,
        "counted_by": answer.counted_by,
        "num_cached_tokens": answer.num_cached_tokens,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "end_to_end_s": answer.end_to_end_s,
        "finish_reason": answer.finish_reason,
    }
