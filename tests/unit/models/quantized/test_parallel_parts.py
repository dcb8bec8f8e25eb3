"""What tensor parallelism is made of: refusals before loading, commands, failures of rank 0."""

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hippo.base.config import SettingsError
from hippo.errors import HippoError, ModelLoadError, UnavailableError
from hippo.models.interface.base import Prompt, SequenceRows, StepPlan
from hippo.models.products.group import RankGroup
from hippo.parallel.commands import Advance, BeginPrefill, Call, Command, Drop
from hippo.parallel.followers import FollowerProcesses
from hippo.parallel.model import ParallelModel
from hippo.parallel.source import ParallelSource
from services.target.config import TargetSettings
from tests.support.devices.parallel import followers_of, plan_of
from tests.support.models.reference import clip, prepare, user
from tests.support.models.toy_model import ToyModel


@pytest.fixture
def toy() -> ToyModel:
    return ToyModel()


@pytest.fixture
def told() -> list[Command]:
    """What the followers are told."""
    return []


@pytest.fixture
def lost() -> Future[HippoError]:
    return Future()


@pytest.fixture
def model(toy: ToyModel, told: list[Command], lost: Future[HippoError]) -> ParallelModel:
    """On a group of whom nobody else is there."""
    group = Mock(RankGroup, size=2, device=torch.device("cpu"), mean=lambda tensor: tensor)
    followers = Mock(FollowerProcesses, lost=lost, send_command=told.append)
    followers.give_up = lost.set_result
    return ParallelModel(toy, group, followers)


def _prompt(toy: ToyModel) -> Prompt:
    return prepare(toy, user(0, "what?"), clip())


def test_each_layer_group_is_a_command_and_an_end_before_the_last_one_another(
    model: ParallelModel, toy: ToyModel, told: list[Command]
) -> None:
    prompt = _prompt(toy)
    visual = model.embed_visual(prompt)
    assert told == []  # the vision tower is rank 0's alone

    *groups, _ = model.prefill(0, prompt, visual, None)
    assert isinstance(told[0], BeginPrefill) and told[0].prompt.items == ()
    assert told[1:] == [Advance(0)] * (len(groups) + 1)

    told.clear()
    model.copy_rows(0, 1, 3)
    assert told == [Call("copy_rows", (0, 1, 3))]
    assert toy.num_copied == 1

    told.clear()
    left = model.prefill(0, prompt, visual, None)
    next(left)
    left.close()
    assert told[1:] == [Advance(1), Drop(1)]

    told.clear()
    plan = StepPlan((SequenceRows(0, 0, (5,)),))
    model.forward(plan)
    assert told == [Call("forward", (plan,))]


def test_a_failure_of_rank_0_between_collectives_ends_the_model(
    model: ParallelModel, toy: ToyModel, lost: Future[HippoError]
) -> None:
    list(model.prefill(0, _prompt(toy), None, None))
    toy.on_forward = Mock(side_effect=RuntimeError("out of memory"))
    plan = StepPlan((SequenceRows(0, 0, (5,)),))
    with pytest.raises(RuntimeError):
        model.forward(plan)
    toy.on_forward = lambda _: None

    assert "out of memory" in lost.result(0).message
    with pytest.raises(UnavailableError, match="out of memory"):
        model.forward(plan)


def test_a_lost_follower_does_not_keep_a_prefill_from_closing(
    model: ParallelModel, toy: ToyModel, told: list[Command], lost: Future[HippoError]
) -> None:
    groups = model.prefill(0, _prompt(toy), None, None)
    next(groups)
    lost.set_result(UnavailableError("rank 1 has gone"))
    groups.close()
    assert not any(isinstance(command, Drop) for command in told)


def test_heads_that_cannot_be_shared_are_refused_before_any_process_starts(
    target_checkpoint: Path,
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("ranks on the CPU need the accelerator hidden: CUDA_VISIBLE_DEVICES=")
    source = ParallelSource(plan_of(target_checkpoint, tensor_parallel=3))
    with pytest.raises(ModelLoadError, match=r"2 key-value heads.*among 3 devices; possible: 2"):
        source.load(lambda _stage, _share: None)
    assert followers_of(os.getpid()) == []
    source.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 0}, "--tensor-parallel is 0"),
        ({"devices": ("cpu", "cpu")}, "above 1"),
        ({"tensor_parallel": 2, "devices": ("cuda:0",)}, "needs 2"),
        ({"tensor_parallel": 2, "device": "cuda", "devices": ("cuda:0", "cuda:1")}, "--device out"),
        ({"tensor_parallel": 2, "cpu_cores": ("0", "x")}, "expected numbers"),
        ({"tensor_parallel": 2, "cpu_core": 0}, "--cpu-cores instead"),
        ({"tensor_parallel": 2, "cpu_cores": ("0", "1"), "num_threads": 2}, "--num-threads out"),
        ({"deterministic": True, "tensor_parallel": 2}, "leave --tensor-parallel out"),
        ({"cuda_graphs": "on", "device": "cuda", "tensor_parallel": 2}, "--cuda-graphs on"),
        ({"cuda_graphs": "on"}, "needs --device cuda"),
        ({"deterministic": True, "deterministic_rows": 0}, "must be 1 to 32"),
        ({"deterministic": True, "deterministic_rows": 33}, "must be 1 to 32"),
        ({"tensor_parallel": 2, "quantization": "int8"}, "--quantization is for one device"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        TargetSettings(model="m", **changes)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, ("cpu", "cpu")),
        ({"device": "cuda"}, ("cuda:0", "cuda:1")),
        ({"device": "cuda:2"}, ("cuda:2", "cuda:3")),
        ({"devices": ("cuda:3", "cuda:1")}, ("cuda:3", "cuda:1")),
    ],
)
def test_ranks_run_on_the_devices_that_are_named_or_follow(
    changes: dict[str, Any], devices: tuple[str, ...]
) -> None:
    assert TargetSettings(model="m", tensor_parallel=2, **changes).load_plan.rank_devices == devices


def test_a_follower_that_ends_before_it_has_its_plan_is_lost_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
        process.wait()
        return process

    monkeypatch.setattr("hippo.parallel.followers._start", start)
    lost: Future[HippoError] = Future()
    followers = FollowerProcesses(plan_of(Path("nowhere")), "file:///nowhere", lost)
    with pytest.raises(UnavailableError, match=r"the process of rank 1 ended \(0\)"):
        followers.wait_ready()
    followers.stop()
    followers.wait_ended()
