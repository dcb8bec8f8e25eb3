"""``hippo bench --questions``: asks the questions of a file, goes on where it stopped, scores."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import product, repeat
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.client import tables
from hippo.client.figures import distributions, notes_on
from hippo.client.latency import TARGET_ONLY, System, turned, warm_up
from hippo.client.requests import RequestForm
from hippo.client.server import Server
from hippo.client.uploads import sent_media
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.benchmark import question_figures
from hippo.lab.benchmark.answer_log import AnswerLog
from hippo.lab.benchmark.plots import draw_answers, draw_speedups
from hippo.lab.benchmark.video_questions import VideoQuestion
from hippo.lab.commands.options import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFile:
    """The questions of a file, and where answers and figures go."""

    path: Path
    questions: tuple[VideoQuestion, ...]
    seed: int  # for the first question
    answers: Path
    markdown: Path | None
    plot: Path | None


@dataclass(slots=True)
class QuestionRun:
    """Asks the questions of a file, one after another, of one or several systems in turn."""

    file: QuestionFile
    server: Server
    form: RequestForm
    policies: Sequence[System]  # asked of a hippo gateway beside target-only
    console: Console
    progress: Console
    _failed: dict[str, str] = field(default_factory=dict)

    @property
    def systems(self) -> list[System]:
        """The measured systems; target-only, the baseline, is a gateway's first."""
        if not self.form.is_hippo:
            return [System(self.form.model, {})]
        others = [system for system in self.policies if system.name != TARGET_ONLY]
        return [System(TARGET_ONLY, {"policy": "off"}), *others]

    def run(self) -> dict[str, Any]:
        """Asks what is not answered yet and prints the table; returns the results for JSON.

        A question that the server refuses is named at the end. Raises HippoError if the server
        fails; the answers until then stay in the file of answers.
        """
        form, file = self.form, self.file
        settings = {
            "url": self.server.url,
            "model": form.model,
            "max_tokens": form.max_tokens,
            "temperature": form.temperature,
            "seed": file.seed,
            "fields": list(form.optional),
        }
        log = AnswerLog(file.answers, settings)
        todo = [
            (number, question, system)
            for number, question in enumerate(file.questions)
            for system in turned(self.systems, number)
            if not log.has(question, system.name)
        ]
        num_known = len(file.questions) * len(self.systems) - len(todo)
        if num_known:
            self._say(f"{num_known} answers were in {file.answers} already")
        tables.watched(self._ask(todo, log), self.progress, title=file.path.name, total=len(todo))
        return self._results(log)

    def _ask(
        self, todo: Sequence[tuple[int, VideoQuestion, System]], log: AnswerLog
    ) -> Iterator[None]:
        with closing(self.server.connect()) as connection:
            if todo:
                systems = [each for each in self.systems if any(each == item[2] for item in todo)]
                # A refusal is told below.
                with suppress(InvalidRequestError), self._media(todo[0][1]) as media:
                    first = todo[0][1].asked(media, seed=self.file.seed)
                    warm_up(connection, self.form, first, systems)
            for number, question, system in todo:
                if question.id not in self._failed:
                    try:
                        with self._media(question) as media:
                            asked = question.asked(media, seed=self.file.seed + number)
                            request = self.form.request(asked, system.speculative)
                            answer = connection.ask(request.body())
                    except InvalidRequestError as error:
                        self._failed[question.id] = error.message
                    else:
                        log.add(question, system.name, answer)
                yield

    def _media(self, question: VideoQuestion) -> AbstractContextManager[str]:
        video = question.video
        return sent_media(self.server, video) if self.form.is_hippo else nullcontext(video)

    def _results(self, log: AnswerLog) -> dict[str, Any]:
        file, form = self.file, self.form
        names = [system.name for system in self.systems]
        answered = [each for each in file.questions if each.id not in self._failed]
        if not answered:
            raise HippoError(f"no question was answered: {next(iter(self._failed.values()))}")
        records = (
            question_figures.records_of(answered, log.answers, names, temperature=form.temperature)
            if form.is_hippo
            else None
        )
        rows = question_figures.summarise_questions(answered, log.answers, names, records=records)
        title = (
            f"{form.model} at {self.server.url}, {len(answered)} questions of {file.path.name}, "
            f"T={form.temperature:g}, up to {form.max_tokens} tokens"
        )
        table = question_figures.table_of(rows)
        self.console.print(tables.questions_table(title, table))
        for question, reason in self._failed.items():
            self._say(f"not answered: {question}: {reason}")
        for note in notes_on(records or ()):
            self._say(note)
        for row in rows[-len(names) :]:
            if row["num_unlike"]:
                self._say(f"{row['num_unlike']} answers of {row['system']} have another score")
        if file.markdown is not None:
            write_text(file.markdown, question_figures.page_of(title, table))
            self._say(f"written to {file.markdown}")
        if file.plot is not None and records is None:
            values = distributions([log.answers[each.id, names[0]] for each in answered])
            draw_answers(names[0], values, file.plot, title=title)
        elif file.plot is not None:
            drawn = [{**row, "system": f"{row['system']}, {row['category']}"}
                     for row in rows if row["system"] != TARGET_ONLY]  # fmt: skip
            draw_speedups(drawn, file.plot, title=title)
        return {
            "file": str(file.path),
            "answers": str(file.answers),
            "failed": self._failed,
            "summary": rows,
            "records": [
                {
                    "id": each.id,
                    "category": each.category,
                    "system": name,
                    "text": log.answers[each.id, name].text,
                    "is_right": each.is_right(log.answers[each.id, name].text),
                    **({} if record is None else record.as_dict()),
                }
                for (each, name), record in zip(
                    product(answered, names), records or repeat(None), strict=False
                )
            ],
        }

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
