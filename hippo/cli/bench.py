"""``hippo bench``: how fast a running server is, seen from outside."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.benchmark import tables
from hippo.benchmark.answers import Answer
from hippo.benchmark.figures import summarise, summarise_alone, summarise_load
from hippo.benchmark.latency import (
    TARGET_ONLY,
    Record,
    System,
    measure,
    measure_alone,
    num_answers,
)
from hippo.benchmark.load import ClosedLoop, LoadRun
from hippo.benchmark.plots import draw_answers, draw_load, draw_speedups
from hippo.benchmark.requests import Question, RequestForm, probe
from hippo.cli.bench_options import DESCRIPTION, EXAMPLES, Plan, add_options, plan_of
from hippo.cli.parsers import Subparsers, add_command
from hippo.errors import ForbiddenError, HippoError, InvalidRequestError, NotFoundError

Document = dict[str, Any]


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "bench",
        run,
        help="measure a running server: latency side by side, or many clients at once",
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures; the exit code."""
    plan = plan_of(arguments)
    is_json_shown = plan.out == "-"
    bench = _Bench(plan, Console(stderr=is_json_shown), Console(stderr=True))
    document = bench.run()
    if is_json_shown:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    elif plan.out is not None:
        try:
            Path(plan.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"{plan.out} cannot be written: {error.strerror}") from None
        bench.say(f"written to {plan.out}")
    return 0


class _Bench:
    """One run of the command: ``console`` for what was found, ``progress`` for what goes on."""

    def __init__(self, plan: Plan, console: Console, progress: Console) -> None:
        self._plan = plan
        self._console = console
        self._progress = progress
        self._form = RequestForm(model="")

    def run(self) -> Document:
        """What was measured, for JSON. Raises HippoError."""
        plan = self._plan
        self._form = self._find_form()
        self._check_plan()
        measured: Document
        if plan.concurrency:
            measured = {"load": self._load()}
        elif self._form.is_hippo:
            measured = {"latency": self._side_by_side()}
        else:
            measured = {"latency": self._alone()}
        if plan.plot is not None:
            self.say(f"written to {plan.plot}")
        return {
            "command": plan.command,
            "client": plan.environment,
            "url": plan.server.url,
            "model": self._form.model,
            "is_hippo": self._form.is_hippo,
            "fields": list(self._form.optional),
            "questions": [question.name for question in plan.questions],
            **measured,
        }

    def say(self, text: str) -> None:
        """A line of plain text."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _find_form(self) -> RequestForm:
        """How the server is to be asked; with advice where it refuses."""
        plan = self._plan
        try:
            model = plan.model or self._only_model(plan.server.models())
            connection = plan.server.connect()
            try:
                with self._progress.status(f"asking {plan.server.url} ..."):
                    return probe(connection, plan.questions[0], replace(plan.form, model=model))
            finally:
                connection.close()
        except ForbiddenError as error:
            advice = "give a key in HIPPO_API_KEY" if plan.server.api_key is None else "another key"
            raise ForbiddenError(f"{error.message} ({advice}?)") from None
        except NotFoundError as error:
            if plan.model is None:
                raise
            raise NotFoundError(f"{error.message} ({self._served()})") from None

    def _only_model(self, names: Sequence[str]) -> str:
        if not names:
            raise NotFoundError(f"{self._plan.server.url} serves no model")
        if len(names) > 1:
            self.say(f"{names[0]} of {len(names)} models; --model chooses another")
        return names[0]

    def _served(self) -> str:
        try:
            return "it serves " + ", ".join(self._plan.server.models())
        except HippoError:
            return "and it does not tell what it serves"

    def _check_plan(self) -> None:
        """Raises InvalidRequestError for what only a gateway of ours can be asked."""
        if self._form.is_hippo:
            return
        if self._plan.policies is not None:
            raise InvalidRequestError(
                f"--policies is for a hippo gateway, and the answers of {self._plan.server.url} "
                "are not those of one"
            )

    def _side_by_side(self) -> Document:
        """Target-only and the policies in turn, at a gateway of ours."""
        plan = self._plan
        systems = plan.policies or (System("adaptive", {"policy": "adaptive"}),)
        records: list[Record] = []
        with tables.progress_bar(self._progress) as progress:
            task = progress.add_task("side by side", total=num_answers(systems, plan.num_asked))
            for record in measure(plan.server, self._form, plan.asked, systems):
                records.append(record)
                progress.advance(task)
        rows = summarise(records)
        title = f"{self._form.model} at {plan.server.url}, {len(plan.asked)} questions, {plan.how}"
        self._console.print(tables.latency_table(title, rows))
        self._notes(records)
        result: Document = {"summary": rows, "records": [each.as_dict() for each in records]}
        if plan.plot is not None:
            draw_speedups(rows, plan.plot, title=title)
        return result

    def _alone(self) -> Document:
        """Any server's answers, one after another."""
        plan, name = self._plan, self._form.model
        answers: list[Answer] = []
        records: list[Document] = []
        with tables.progress_bar(self._progress) as progress:
            task = progress.add_task("one at a time", total=len(plan.asked))
            for question, answer in measure_alone(plan.server, self._form, plan.asked):
                answers.append(answer)
                records.append(_record(question, answer))
                progress.advance(task)
        row = summarise_alone(name, answers)
        title = f"{name} at {plan.server.url}, {len(answers)} questions, {plan.how}"
        self._console.print(tables.alone_table(title, row))
        self._say_counted(row["counted_by"])
        if plan.plot is not None:
            values = {
                "ms to the first token": {name: [1e3 * each.ttft_s for each in answers]},
                "ms a token after it": {name: [1e3 * each.tpot_s for each in answers]},
                "ms end to end": {name: [1e3 * each.end_to_end_s for each in answers]},
            }
            draw_answers(values, plan.plot, title=title)
        return {"summary": [row], "records": records}

    def _load(self) -> list[Document]:
        """Every number of clients with every system in turn."""
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
        self._say_counted(sorted({each for line in lines for each in line["counted_by"]}))
        if plan.plot is not None:
            draw_load(lines, plan.plot, title=title)
        return lines

    def _references(self) -> dict[int, tuple[int, ...]]:
        """Target-only's token ids by question, asked one at a time."""
        plan = self._plan
        connection = plan.server.connect()
        try:
            with tables.progress_bar(self._progress) as progress:
                return {
                    index: connection.ask(
                        self._form.request(question, {"policy": "off"}).body()
                    ).token_ids
                    for index, question in enumerate(
                        progress.track(plan.asked, description="target-only, one at a time")
                    )
                }
        finally:
            connection.close()

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

    def _notes(self, records: Sequence[Record]) -> None:
        unequal = sum(not record.is_equal for record in records)
        if unequal:
            self.say(
                f"{unequal} of {len(records)} answers differ from target-only's: expected in "
                "bfloat16 at times, never in float32"
            )
        for problem in dict.fromkeys(_draft_problems(records)):
            self.say(f"no draft took part in some answers: {problem}")

    def _say_counted(self, counted_by: Sequence[str]) -> None:
        if "pieces" in counted_by:
            self.say(
                "the server does not tell how many tokens an answer has: its pieces of text were "
                "counted, which may hold several tokens"
            )


def _draft_problems(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        figures = record.figures
        if figures["policy"] != "off" and not figures["draft_used"] and figures["draft_problem"]:
            yield figures["draft_problem"]


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
