"""Questions, batches, the file of answers, and the training with its resumption."""

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

from hippo.errors import HippoError, InvalidRequestError
from hippo.lab.distill import training
from hippo.lab.distill.answers import AnswerFile, TargetAnswer
from hippo.lab.distill.batches import grouped, training_batches
from hippo.lab.distill.examples import DraftExample, example_path, num_rows
from hippo.lab.distill.questions import asked_about, plan_questions
from hippo.lab.distill.training import (
    TrainingPlan,
    TrainingState,
    rate_at,
    read_state,
    run_training,
)


def videos(folder: Path, count: int) -> Path:
    (folder / "below").mkdir()
    for number in range(count):
        (folder / "below" / f"{number}.MP4").write_bytes(b"")
    (folder / "notes.txt").write_text("no video")
    return folder


def test_a_share_of_the_videos_is_held_out_with_all_questions(tmp_path: Path) -> None:
    asked = asked_about(videos(tmp_path, 20), None, num_default=3)
    assert len(asked) == 60 and len({name for name, *_ in asked}) == 60
    options = {"ratio": 0.9, "temperatures": (0.0, 0.7), "held_out_share": 0.1, "seed": 3}
    planned = plan_questions(asked, **options)  # type: ignore[arg-type]
    held_out = [each for each in planned if each.is_held_out]
    others = [each for each in planned if not each.is_held_out]
    assert planned == held_out + others
    assert planned == plan_questions(asked, **options)  # type: ignore[arg-type]
    assert len({each.video for each in held_out}) == 2 and len(held_out) == 6
    assert not {each.video for each in held_out} & {each.video for each in others}
    assert {(each.ratio, each.temperature) for each in held_out} == {(0.9, 0.0)}
    assert len(others) == 2 * 54 and len({each.id for each in planned}) == len(planned)
    ratios = [each.ratio for each in others]
    assert min(ratios) == 0.0 and ratios.count(0.9) > 20 and max(ratios) <= 0.95
    assert all(ratio == 0 or ratio >= 0.8 for ratio in ratios)


def test_questions_of_a_file_are_about_files_here(tmp_path: Path) -> None:
    folder = videos(tmp_path, 2)
    file = tmp_path / "q.jsonl"
    lines = [{"id": "a", "video": "below/0.MP4", "question": "What?"}]
    file.write_text(json.dumps(lines[0]))
    assert asked_about(folder, file, num_default=3) == [("a", folder / "below/0.MP4", "What?")]
    file.write_text(json.dumps({"id": "a", "video": "https://a.org/b.mp4", "question": "What?"}))
    with pytest.raises(InvalidRequestError, match="give files of this machine"):
        asked_about(folder, file, num_default=3)


def test_there_must_be_two_videos(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        asked_about(tmp_path / "none", None, num_default=1)
    with pytest.raises(InvalidRequestError, match="has no videos"):
        asked_about(tmp_path, None, num_default=1)
    asked = asked_about(videos(tmp_path, 1), None, num_default=3)
    with pytest.raises(InvalidRequestError, match="give two videos at least"):
        plan_questions(asked, ratio=0.9, temperatures=(0.0,), held_out_share=0.5, seed=0)


def test_batches_hold_examples_of_about_one_length() -> None:
    lengths = [random.Random(0).randint(20, 300) for _ in range(100)] + [5000]
    batches = grouped(lengths, 1200)
    assert sorted(index for batch in batches for index in batch) == list(range(101))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 1200
    assert [100] in batches
    rows = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert rows < 1.1 * sum(lengths)
    first = list(islice(training_batches(lengths, 1200, seed=1), 40))
    assert first == list(islice(training_batches(lengths, 1200, seed=1), 40))
    assert sorted(index for batch in first for index in batch) != list(range(101))  # a new epoch


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_at(step, 100) for step in range(100)]
    assert rates.index(max(rates)) in (4, 5) and max(rates) == 1.0
    assert rates[0] == 0.2 and rates[-1] < 0.04 and sorted(rates[5:], reverse=True) == rates[5:]
    assert rate_at(0, 1) == 1.0


def test_a_training_stops_if_it_gets_no_better() -> None:
    state = TrainingState(step=4, num_steps=9, history=[(0, 0.5), (2, 0.7), (3, 0.6), (4, 0.7)])
    assert state.best == (2, 0.7)
    assert state.is_enough(2) and not state.is_enough(3)
    assert replace(state, step=9).is_enough(3)


def answer(number: int) -> TargetAnswer:
    return TargetAnswer(
        id=f"clip {number}",
        token_ids=(3, 5),
        top=(((3, -0.25), (4, -2.0)), ((5, -0.5), (6, -1.0))),
        kept=None if number % 2 else (1, 4),
        num_prompt_tokens=40,
        num_visual_tokens=20,
        prompt_hash="ab",
        max_visual_tokens=1000,
    )


def test_answers_are_kept_and_a_line_that_is_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path)
    for number in range(3):
        file.add(answer(number))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "clip 3", "tok')
    again = AnswerFile(path)
    assert again.answers == {f"clip {number}": answer(number) for number in range(3)}
    assert path.read_bytes() == whole
    assert [again.answers[f"clip {n}"].num_draft_prompt_tokens for n in (0, 1)] == [22, 40]
    path.write_bytes(b"something\n" + whole)
    with pytest.raises(InvalidRequestError, match="line 1: this is no answer"):
        AnswerFile(path)


@pytest.fixture
def plan(target_checkpoint: Path, tmp_path: Path) -> TrainingPlan:
    """A plan with eight small examples, two of them held out."""
    generator = torch.Generator().manual_seed(0)
    for number in range(8):
        length, count = 12 + number, 5
        ids = torch.randint(10, 200, (length,), generator=generator)
        answer_ids = (ids[-count:] + 1) % 200
        DraftExample(
            input_ids=ids,
            positions=torch.arange(length).expand(3, -1),
            visual_rows=torch.tensor([2, 3]),
            features=torch.randn(2, 64, generator=generator),
            answer_ids=answer_ids,
            top_ids=torch.stack((answer_ids, answer_ids + 1), 1),
            top_logprobs=torch.tensor([[-0.1, -3.0]]).expand(count, -1),
        ).save(example_path(tmp_path, number))
    files = [example_path(tmp_path, number) for number in range(8)]
    assert [num_rows(path) for path in files] == list(range(12, 20))
    (tmp_path / "training").mkdir()
    return TrainingPlan(
        draft=target_checkpoint,
        folder=tmp_path / "training",
        examples=(*files[2:], *files[:2]),
        held_out=tuple(files[:2]),  # learnt too, so that agreement rises
        lora_rank=None,
        learning_rate=5e-3,
        epochs=8,
        batch_rows=60,
        num_accumulated=2,
        patience=100,
        seed=0,
        device="cpu",
        num_processes=1,
        gradient_checkpointing=False,
    )


def weights_of(plan: TrainingPlan) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in training.best_student(plan).trained.items()}


def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(plan)
    state = read_state(plan.folder)
    assert state.is_over and state.step == state.num_steps == 12
    assert state.history[0][1] < 0.2 and state.best[1] > 0.9
    again = replace(plan, folder=plan.folder.parent / "again")
    again.folder.mkdir()
    monkeypatch.setattr(training.Training, "_end_step", stopping(after=7))
    with pytest.raises(KeyboardInterrupt):
        run_training(again)
    monkeypatch.undo()
    assert 0 < read_state(again.folder).step <= 7
    run_training(again)
    assert read_state(again.folder).history == state.history
    torch.testing.assert_close(weights_of(again), weights_of(plan))


def stopping(*, after: int) -> Callable[[Any], None]:
    end_step = training.Training._end_step

    def end(self: training.Training) -> None:
        end_step(self)
        if self._state.step == after:
            raise KeyboardInterrupt

    return end


@pytest.fixture
def one_import(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes start as by "spawn", but what they import is imported once."""
    forked = partial(LaunchConfig, start_method="forkserver")
    monkeypatch.setattr(training, "LaunchConfig", forked)
    multiprocessing.set_forkserver_preload(["tests.support.training_imports"])
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_import")
def test_several_processes_share_the_work(plan: TrainingPlan) -> None:
    run_training(replace(plan, num_processes=2, num_accumulated=1))
    state = read_state(plan.folder)
    assert state.is_over and state.num_steps == 12 and state.best[1] > 0.9
    with pytest.raises(InvalidRequestError, match=r"2 processes, .* 1 would continue"):
        run_training(plan)


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    torch.save({"state": {"step": 3, "first_traces": []}}, tmp_path / "state.pt")
    assert read_state(tmp_path).step == 3


def test_a_damaged_file_is_named(plan: TrainingPlan) -> None:
    (plan.folder / "state.pt").write_bytes(b"nothing")
    with pytest.raises(HippoError, match=r"state\.pt is damaged"):
        read_state(plan.folder)
    plan.examples[0].write_bytes(b"nothing")
    with pytest.raises(HippoError, match="the command writes it again"):
        num_rows(plan.examples[0])
