"""Trains the student with accelerate: several GPUs, mixed precision, early stop, resumption."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader

from hippo.client.tables import progress_bar
from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.distill.batches import ExampleBatch, ExampleBatches, grouped, training_batches
from hippo.lab.distill.examples import num_rows
from hippo.lab.distill.student import Student, agreements, distillation_loss, new_student

_WARM_UP_SHARE = 0.05
_FINAL_RATE = 0.03  # last share of the learning rate
_MOST_GRADIENT = 1.0  # norm to which gradients are clipped
_NUM_EVALUATIONS = 20
_STATE_FILE = "state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What is trained, on which examples, and how.

    ``device`` is cpu or cuda; each of ``num_processes`` has a GPU of its own. A forward has at most
    ``batch_rows`` rows of prompts and answers, and a step has ``num_accumulated`` forwards of each
    process. ``lora_rank`` None trains all weights of the language model. ``patience`` evaluations
    without a better agreement end the training.
    """

    draft: Path
    folder: Path
    examples: tuple[Path, ...]
    held_out: tuple[Path, ...]
    lora_rank: int | None
    learning_rate: float
    epochs: float
    batch_rows: int
    num_accumulated: int
    patience: int
    seed: int
    device: str
    num_processes: int
    gradient_checkpointing: bool


@dataclass(slots=True)
class TrainingState:
    """How far a training is. ``history`` has the step and the agreement on held-out answers of each
    evaluation, the first before any training. ``num_processes`` share each step."""

    step: int = 0
    num_steps: int = 0
    num_processes: int = 1
    is_over: bool = False
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[int, float]:
        """The step of the best agreement so far, and this agreement."""
        return max(self.history, key=lambda each: each[1])

    def is_enough(self, patience: int) -> bool:
        """Whether all steps are done, or the last ``patience`` evaluations were no better."""
        since = [step for step, _ in self.history if step > self.best[0]]
        return self.step >= self.num_steps or len(since) >= patience


def run_training(plan: TrainingPlan) -> None:
    """Trains to the end, in this process or in several, from where an earlier training stopped.

    Raises InvalidRequestError if that one had another number of processes, which changes the steps,
    and HippoError if a process fails.
    """
    state = read_state(plan.folder)
    if state.history and state.num_processes != plan.num_processes:
        raise InvalidRequestError(
            f"{plan.folder} is of a training with {state.num_processes} processes, one for each "
            f"GPU, which {plan.num_processes} would continue with other steps: make as many GPUs "
            f"visible as before (CUDA_VISIBLE_DEVICES), or delete {plan.folder} to begin again"
        )
    if plan.num_processes == 1:
        train(plan)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, train)(plan)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise HippoError(f"a process of the training failed: {failure.message}") from None
    except SignalException:
        raise KeyboardInterrupt from None


def train(plan: TrainingPlan) -> None:
    """Trains in this process, one of several or the only one, and goes on where it stopped.

    Raises HippoError for files that are damaged or cannot be written.
    """
    Training(plan).run()


def read_state(folder: Path) -> TrainingState:
    """Returns the state of the training in ``folder``; a new one if there is none. Raises
    HippoError if its file is damaged."""
    saved = _read(folder / _STATE_FILE)
    return TrainingState() if saved is None else _state_of(saved)


def _state_of(saved: Mapping[str, Any]) -> TrainingState:
    """Returns the state of a file, which an earlier version may have written."""
    names = {each.name for each in fields(TrainingState)}
    return TrainingState(**{name: saved["state"][name] for name in names & saved["state"].keys()})


def best_student(plan: TrainingPlan) -> Student:
    """Returns the student with the best weights of a training, on the CPU in float32. Raises
    HippoError if the training's file is missing or damaged."""
    saved = _read(plan.folder / _STATE_FILE)
    if saved is None:
        raise HippoError(f"{plan.folder} has no {_STATE_FILE}")
    student = new_student(plan.draft, torch.float32, lora_rank=plan.lora_rank)
    student.load_trained(saved["best"])
    return student


def agreement_of(traces: Sequence[str]) -> float:
    """Returns the share of all tokens of the traces on which the draft agrees."""
    marks = "".join(traces)
    return marks.count("1") / len(marks)


def rate_at(step: int, num_steps: int) -> float:
    """Returns the share of the learning rate at a step: linear warm-up, then half a cosine."""
    warm_up = max(1, round(_WARM_UP_SHARE * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    part = (step - warm_up) / max(1, num_steps - warm_up)
    return _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * part)) / 2


class Training:
    """One process's part of the training."""

    def __init__(self, plan: TrainingPlan) -> None:
        self._plan = plan
        is_on_cpu = plan.device == "cpu"
        precision = "no" if is_on_cpu else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        self._accelerator = Accelerator(
            cpu=is_on_cpu,
            mixed_precision=precision,
            gradient_accumulation_steps=plan.num_accumulated,
        )
        torch.manual_seed(plan.seed)
        # Weights that are trained are in float32; those under adapters may stay as they are.
        is_whole = is_on_cpu or plan.lora_rank is None
        dtype = torch.float32 if is_whole else "auto"
        self._student = new_student(plan.draft, dtype, lora_rank=plan.lora_rank)
        if plan.gradient_checkpointing:
            self._student.language_model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(
            self._student.trained.values(),
            lr=plan.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._model, self._optimizer = self._accelerator.prepare(self._student, optimizer)
        self._lengths = [num_rows(path) for path in plan.examples]
        self._held_out = grouped([num_rows(path) for path in plan.held_out], plan.batch_rows)
        self._per_step = plan.num_accumulated * self._accelerator.num_processes
        num_batches = len(grouped(self._lengths, plan.batch_rows))
        num_steps = max(1, round(plan.epochs * num_batches / self._per_step))
        self._interval = max(1, num_steps // _NUM_EVALUATIONS)
        self._state = TrainingState(num_steps=num_steps, num_processes=plan.num_processes)
        self._best: Mapping[str, torch.Tensor] = {}

    def run(self) -> None:
        """Trains from the last saved state to the end."""
        accelerator, state = self._accelerator, self._restored()
        console = Console(stderr=True, quiet=not accelerator.is_main_process)
        with progress_bar(console) as progress:
            task = progress.add_task("training", total=state.num_steps, completed=state.step)
            if not state.history:
                self._evaluate()
            self._model.train()
            for number, batch in enumerate(self._batches(), 1):
                if state.is_enough(self._plan.patience):
                    break
                self._learn(batch.to(accelerator.device))
                if number % self._plan.num_accumulated == 0:
                    self._end_step()
                    progress.update(task, completed=state.step, description=self._describe())
        state.is_over = True
        self._save()
        accelerator.end_training()

    def _batches(self) -> DataLoader[ExampleBatch]:
        """Returns this process's batches from the next step on."""
        plan, state, accelerator = self._plan, self._state, self._accelerator
        stream = training_batches(self._lengths, plan.batch_rows, seed=plan.seed)
        wanted = islice(stream, state.step * self._per_step, state.num_steps * self._per_step)
        mine = list(wanted)[accelerator.process_index :: accelerator.num_processes]
        return self._loader(plan.examples, mine)

    def _loader(
        self, files: Sequence[Path], wanted: Sequence[Sequence[int]]
    ) -> DataLoader[ExampleBatch]:
        num_workers = 0 if self._plan.device == "cpu" else 2
        batches = ExampleBatches(files, wanted)
        return DataLoader(batches, batch_size=None, num_workers=num_workers)

    def _learn(self, batch: ExampleBatch) -> None:
        """Adds the batch's gradients, and updates the weights if it is the step's last."""
        accelerator = self._accelerator
        rate = self._plan.learning_rate * rate_at(self._state.step, self._state.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with accelerator.accumulate(self._model):
            accelerator.backward(distillation_loss(self._model(batch), batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self._student.trained.values(), _MOST_GRADIENT)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _end_step(self) -> None:
        state = self._state
        state.step += 1
        if state.step % self._interval == 0 or state.step == state.num_steps:
            self._evaluate()
            self._model.train()

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Adds the agreement on held-out answers to the state, and saves it with the weights."""
        accelerator, state, files = self._accelerator, self._state, self._plan.held_out
        self._model.eval()
        mine = self._held_out[accelerator.process_index :: accelerator.num_processes]
        found: list[tuple[str, str]] = []
        for batch, indices in zip(self._loader(files, mine), mine, strict=True):
            moved = batch.to(accelerator.device)
            traces = agreements(self._student(moved), moved)
            found += zip([files[index].stem for index in indices], traces, strict=True)
        named = dict(gather_object(found))  # a batch may come from two processes
        state.history.append((state.step, agreement_of(list(named.values()))))
        if state.best[0] == state.step:
            self._best = {
                name: weight.detach().to("cpu", copy=True)
                for name, weight in self._student.trained.items()
            }
        self._save()

    def _save(self) -> None:
        if self._accelerator.is_main_process:
            path = self._plan.folder / _STATE_FILE
            content = {
                "state": asdict(self._state),
                "weights": {name: each.detach() for name, each in self._student.trained.items()},
                "best": self._best,
                "optimizer": self._optimizer.state_dict(),
            }
            try:
                torch.save(content, path.with_suffix(".partial"))
                os.replace(path.with_suffix(".partial"), path)
            except (OSError, RuntimeError) as error:
                raise HippoError(f"{path} cannot be written: {error}") from None
        self._accelerator.wait_for_everyone()

    def _restored(self) -> TrainingState:
        """Returns the state, after loading what an earlier run has saved."""
        saved = _read(self._plan.folder / _STATE_FILE)
        if saved is not None:
            self._state = _state_of(saved)
            self._best = saved["best"]
            self._student.load_trained(saved["weights"])
            self._optimizer.load_state_dict(saved["optimizer"])
        return self._state

    def _describe(self) -> str:
        step, best = self._state.best
        return f"training (agreement {self._state.history[-1][1]:.2%}, best {best:.2%} at {step})"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return found
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise HippoError(f"{path} is damaged ({error}): delete {path.parent}") from None
