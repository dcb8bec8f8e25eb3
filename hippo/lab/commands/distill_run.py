"""One run of ``hippo distill``: its stages, each of which goes on where it stopped."""

import argparse
import asyncio
import contextlib
import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hippo.cli.stack import Stack, StackOptions
from hippo.cli.up import bring_up, quiet
from hippo.client.tables import progress_bar, watched
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.commands.distill_checks import (
    check_same,
    check_trained,
    claim_folder,
    fitting_draft,
    parts_of_training,
    read_json,
    resolved,
    write_json,
)
from hippo.lab.distill import results
from hippo.lab.distill.answers import AnswerFile, TargetAnswer, ask_target
from hippo.lab.distill.examples import check_disk, example_path, write_examples
from hippo.lab.distill.questions import TargetQuestion, asked_about, plan_questions
from hippo.lab.distill.training import TrainingPlan, best_student, read_state, run_training
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model

_MOST_NAMED = 5  # refused questions


class Distillation:
    """The stages of one run; all that they leave is in ``arguments.out``.

    The constructor checks the checkpoints, videos, questions and the folder. Raises HippoError.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        options: StackOptions,
        console: Console,
        progress: Console,
    ) -> None:
        self._given = arguments
        self._out: Path = arguments.out.expanduser().resolve()
        self._console = console
        self._progress = progress
        asked = asked_about(
            arguments.videos.expanduser().resolve(),
            arguments.questions,
            num_default=arguments.questions_per_video,
        )
        self._questions = plan_questions(
            asked,
            ratio=arguments.pruning_ratio,
            temperatures=arguments.temperatures,
            held_out_share=arguments.held_out_share,
            seed=arguments.seed,
        )
        self._draft = fitting_draft(arguments.target_model, arguments.draft_model, progress)
        folders = {str(question.video.resolve().parent) for question in self._questions}
        if any("," in folder for folder in folders):
            raise InvalidRequestError("--videos: the name of a folder may not have a comma")
        allowed = (*filter(None, options.allowed_local_media_path.split(",")), *sorted(folders))
        self._options = replace(
            options,
            allowed_local_media_path=",".join(allowed),
            gateway_args=(
                "--calibration-share", "0",
                "--pruning-ratio", str(arguments.pruning_ratio),
                "--pruning-min-visual-tokens", str(arguments.pruning_min_visual_tokens),
                *options.gateway_args,
            ),
        )  # fmt: skip
        claim_folder(self._out, self._data_settings(asked))
        check_trained(self._out)
        self._answers = AnswerFile(self._out / "answers.jsonl")

    def run(self) -> None:
        """Runs what is left to do, and prints the table. Raises HippoError."""
        before = self._before()
        self._write_examples()
        self._train()
        after = self._after()
        self._report(before, after)

    def _before(self) -> results.Figures:
        """Lets the target answer, and measures the pair before the training."""
        path, refusals = self._out / "before.json", self._out / "refused.json"
        unanswered = [each for each in self._questions if each.id not in self._answers.answers]
        # A training goes on with the answers that it began with.
        todo = [] if (self._out / "training" / "settings.json").exists() else unanswered
        if not todo and path.exists():
            self._say(f"1  all {len(self._answers.answers)} answers of the target are there")
            if unanswered:
                self._say(
                    f"   {len(unanswered)} refused questions are left out ({refusals}): delete "
                    f"{parts_of_training(self._out)} to ask them again"
                )
            return read_json(path)
        self._say(f"1  the target answers {len(todo)} of {len(self._questions)} questions")
        with self._serving(self._options) as stack:
            with progress_bar(self._progress) as progress:
                task = progress.add_task("answers", total=len(todo))
                refused = asyncio.run(
                    ask_target(
                        stack.address("target"),
                        todo,
                        self._answers,
                        max_tokens=self._given.max_tokens,
                        min_visual_tokens=self._given.pruning_min_visual_tokens,
                        on_answer=lambda: progress.advance(task),
                    )
                )
            write_json(refusals, refused)
            for name, reason in list(refused.items())[:_MOST_NAMED]:
                self._say(f"   refused: {name}: {reason}")
            if refused:
                self._say(f"   {len(refused)} refused questions are left out: {refusals}")
            return self._measured(stack, path)

    def _after(self) -> results.Figures:
        path = self._out / "after.json"
        if path.exists():
            return read_json(path)
        self._say("4  the pair is served with the trained draft")
        options = replace(self._options, draft_model=str(self._out / "draft"))
        with self._serving(options) as stack:
            return self._measured(stack, path)

    @contextlib.contextmanager
    def _serving(self, options: StackOptions) -> Iterator[Stack]:
        with Stack(options, quiet) as stack:
            bring_up(stack, self._progress)
            try:
                yield stack
            except HippoError:
                stack.check_running()  # says more, if a process has ended
                raise

    def _measured(self, stack: Stack, path: Path) -> results.Figures:
        """Measures the pair on held-out questions; writes and returns the figures."""
        answered = [question for question, _ in self._answered(is_held_out=True)]
        count = min(self._given.measured_questions, len(answered))
        chosen = [answered[place * len(answered) // count] for place in range(count)]
        with _on_core(self._options.draft_core):  # keeps this client off the target's core
            records = watched(
                results.measure_pair(
                    stack.url,
                    chosen,
                    served_name=self._options.served_name,
                    max_tokens=self._given.max_tokens,
                ),
                self._progress,
                title="held-out questions",
                total=results.num_measured(chosen),
            )
        figures = results.figures_of(records)
        write_json(path, figures)
        return figures

    def _answered(self, *, is_held_out: bool) -> list[tuple[TargetQuestion, TargetAnswer]]:
        """Returns the answered questions of one part. Raises HippoError if there are none."""
        found = [
            (question, self._answers.answers[question.id])
            for question in self._questions
            if question.is_held_out == is_held_out and question.id in self._answers.answers
        ]
        if not found:
            part = "held-out" if is_held_out else "training's"
            raise HippoError(f"the target refused all questions about the {part} videos")
        return found

    def _files(self, *, is_held_out: bool) -> dict[str, Path]:
        """Returns the example's file by question."""
        numbers = {question.id: number for number, question in enumerate(self._questions)}
        return {
            question.id: example_path(self._out / "examples", numbers[question.id])
            for question, _ in self._answered(is_held_out=is_held_out)
        }

    def _write_examples(self) -> None:
        """Runs the draft's processor and vision tower over all answered questions."""
        if (self._out / "draft").exists():
            return
        (self._out / "examples").mkdir(exist_ok=True)
        wanted = [
            (files[question.id], question, answer)
            for is_held_out in (True, False)
            for files in [self._files(is_held_out=is_held_out)]
            for question, answer in self._answered(is_held_out=is_held_out)
            if not files[question.id].exists()
        ]
        if not wanted:
            return
        self._say(f"2  the draft's inputs of {len(wanted)} questions")
        options = self._options
        on_cpu = options.draft_device.startswith("cpu")
        longest = max(answer.num_prompt_tokens + len(answer.token_ids) for *_, answer in wanted)
        with self._progress.status("loading the draft ..."):
            model = load_model(
                LoadPlan(
                    str(self._draft.folder),
                    device=options.draft_device,
                    dtype="float32" if on_cpu else options.dtype_of_draft,
                    max_context_length=longest + 1,
                )
            )
            check_disk(self._out, [answer for *_, answer in wanted], model)
        with progress_bar(self._progress) as progress:
            task = progress.add_task("inputs", total=len(wanted))
            write_examples(model, wanted, lambda: progress.advance(task))
        del model
        gc.collect()
        torch.cuda.empty_cache()

    def _train(self) -> None:
        """Trains, and writes the checkpoint."""
        goal, folder = self._out / "draft", self._out / "training"
        settings = self._training_settings()
        if (folder / "settings.json").exists():
            check_same(
                folder / "settings.json",
                settings,
                f"delete {parts_of_training(self._out)} to train with others",
            )
        if goal.exists():
            self._say(f"{goal} is there")
            return
        folder.mkdir(exist_ok=True)
        write_json(folder / "settings.json", settings)
        plan = self._training_plan(settings)
        self._say(f"3  training on {len(plan.examples)} answers, {len(plan.held_out)} held out")
        if not read_state(folder).is_over:
            run_training(plan)
        state = read_state(folder)
        step, agreement = state.best
        self._say(
            f"   held-out agreement {state.history[0][1]:.2%} before, {agreement:.2%} after step "
            f"{step} of {state.history[-1][0]}"
        )
        if step == 0:
            raise HippoError(
                "no evaluation was better than the draft as it was: give more videos, or another "
                f"--learning-rate (now {plan.learning_rate:g}), and delete {folder}"
            )
        with self._progress.status("writing the checkpoint ..."):
            best_student(plan).save_checkpoint(goal, self._draft)

    def _training_settings(self) -> dict[str, Any]:
        given = self._given
        names = ("lora_rank", "learning_rate", "epochs", "batch_tokens", "accumulate", "patience")
        return {**{name: getattr(given, name) for name in names}, "seed": given.seed}

    def _training_plan(self, settings: Mapping[str, Any]) -> TrainingPlan:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpointing = self._given.gradient_checkpointing
        return TrainingPlan(
            draft=self._draft.folder,
            folder=self._out / "training",
            examples=tuple(self._files(is_held_out=False).values()),
            held_out=tuple(self._files(is_held_out=True).values()),
            lora_rank=settings["lora_rank"],
            learning_rate=settings["learning_rate"],
            epochs=settings["epochs"],
            batch_rows=settings["batch_tokens"],
            num_accumulated=settings["accumulate"],
            patience=settings["patience"],
            seed=settings["seed"],
            device=device,
            num_processes=max(1, torch.cuda.device_count()),
            gradient_checkpointing=device == "cuda" if checkpointing is None else checkpointing,
        )

    def _report(self, before: results.Figures, after: results.Figures) -> None:
        state = read_state(self._out / "training")
        before |= {"agreement": state.history[0][1]}
        after |= {"agreement": state.best[1]}
        videos = {question.video for question in self._questions if question.is_held_out}
        num_answers = len(self._answered(is_held_out=True))
        title = (
            f"{self._draft.name}: agreement on {num_answers} held-out answers about "
            f"{len(videos)} videos, {after['num_answers']} questions served"
        )
        self._console.print(results.table_of(title, before, after))
        write_json(
            self._out / "report.json", {"before": before, "after": after, "history": state.history}
        )
        text = results.markdown_of(title, before, after)
        (self._out / "report.md").write_text(text, encoding="utf-8")
        self._say(f"figures: {self._out / 'report.json'}; serve the pair with")
        self._say(
            f"  hippo up --target-model {self._given.target_model} --draft-model "
            f"{self._out / 'draft'}"
        )

    def _data_settings(self, asked: Sequence[tuple[str, Path, str]]) -> dict[str, Any]:
        given = self._given
        names = ("max_tokens", "temperatures", "held_out_share", "pruning_ratio",
                 "pruning_min_visual_tokens", "seed")  # fmt: skip
        described = json.dumps([[name, str(video), prompt] for name, video, prompt in asked])
        return {
            "target": resolved(given.target_model),
            "draft": resolved(given.draft_model),
            "questions": hashlib.sha256(described.encode()).hexdigest()[:16],
            **{name: getattr(given, name) for name in names},
        }

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Keeps this process on a core for the time of the ``with`` block."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
