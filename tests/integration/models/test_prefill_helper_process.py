"""A prefill helper in a process of its own: it helps, dies, stops and comes back."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from hippo.errors import ModelLoadError
from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt
from hippo.models.interface.plan import LoadPlan
from hippo.parallel.help_source import HelpedSource
from hippo.parallel.helped import HelpedModel
from tests.support.devices.helper import begin_help
from tests.support.devices.parallel import followers_of
from tests.support.models.reference import assert_close, clip, prepare, user

SECONDS = 30.0


@contextmanager
def helped(folder: Path, num_layers: int | None = None) -> Iterator[HelpedModel]:
    plan = LoadPlan(
        str(folder), dtype="float32", num_slots=2, max_context_length=2048, num_threads=1
    )
    helper = plan.for_helper(device="cpu", cpu_core=None)
    source, others = HelpedSource(plan, helper, num_layers=num_layers), followers_of(os.getpid())
    try:
        model = source.load(lambda _stage, _share: None)
        assert isinstance(model, HelpedModel)
        yield model
    finally:
        source.close()
        assert followers_of(os.getpid()) == others


@pytest.fixture(scope="module")
def started(target_checkpoint: Path) -> Iterator[HelpedModel]:
    with helped(target_checkpoint) as model:
        yield model


@pytest.fixture
def model(started: HelpedModel) -> HelpedModel:
    """A model whose helper is free."""
    helper = started.helper
    assert helper is not None
    wait_until(lambda: helper.is_free)
    return started


def helper_of(model: HelpedModel) -> psutil.Process:
    (process,) = followers_of(os.getpid())
    return process


def long_prompt(model: HelpedModel) -> Prompt:
    prompt = prepare(model, user(0, "what is in the thing?"), clip(num_frames=64, size=140))
    assert prompt.length > 512
    return prompt


def prefill(
    model: HelpedModel,
    prompt: Prompt,
    slot: int,
    *,
    is_helped: bool = False,
    after_piece: Callable[[int], None] = lambda index: None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The logits, the scores of visual tokens, and the number of the helper's rows."""
    tap, logits = AttentionTap(2), None
    help = begin_help(model, slot, prompt, tap) if is_helped else None
    pieces = (
        model.prefill(slot, prompt, model.embed_visual(prompt), None, tap)
        if help is None
        else help.run()
    )
    for index, piece in enumerate(pieces):
        after_piece(index)
        logits = piece
    assert logits is not None and tap.layer_scores is not None
    if help is None:
        return logits, tap.layer_scores, 0
    help.close()
    return logits, tap.layer_scores, help.num_rows


def helped_rows(
    model: HelpedModel, prompt: Prompt, after_piece: Callable[[int], None] = lambda index: None
) -> int:
    """Asserts that help changes nothing, and returns the number of the helper's rows."""
    *alone, _ = prefill(model, prompt, 0)
    *with_help, num_rows = prefill(model, prompt, 1, is_helped=True, after_piece=after_piece)
    for expected, actual in zip(alone, with_help, strict=True):
        assert_close(actual, expected)
    return num_rows


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_helps_dies_is_not_missed_and_is_started_again(
    model: HelpedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HelpedModel, "patience_s", lambda *_: SECONDS)
    prompt = long_prompt(model)
    assert helped_rows(model, prompt) == prompt.length
    process = helper_of(model)

    def kill(index: int) -> None:
        if index == 1:
            process.kill()

    assert helped_rows(model, prompt, kill) < prompt.length
    helper = model.helper
    assert helper is not None and helper.is_lost
    assert model.begin_help(1, prompt, None, 0) is None
    wait_until(lambda: "read without it" in caplog.text and helper.is_free)
    assert helper_of(model) != process
    assert helped_rows(model, prompt) == prompt.length


def test_one_that_is_stopped_is_left_alone_and_helps_again_later(
    model: HelpedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, process = long_prompt(model), helper_of(model)

    process.send_signal(signal.SIGSTOP)
    helped_rows(model, prompt)
    helper = model.helper
    assert helper is not None and not helper.is_free and not helper.is_lost
    assert model.begin_help(1, prompt, None, 0) is None
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: helper.is_free)
    monkeypatch.setattr(HelpedModel, "patience_s", lambda *_: SECONDS)
    assert helped_rows(model, prompt) > 0


def test_a_prefill_that_is_left_frees_the_helper(
    model: HelpedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelpedModel, "patience_s", lambda *_: SECONDS)
    prompt, helper = long_prompt(model), model.helper
    assert helper is not None

    def has_begun(help: PrefillHelp) -> None:
        assert not helper.is_free

    def is_in_the_tower(help: PrefillHelp) -> None:
        help.add_features(next(model.embed_pieces(prompt)))

    def is_in_the_layers(help: PrefillHelp) -> None:
        for rows in model.embed_pieces(prompt):
            help.add_features(rows)
        next(help.run())

    for advance in (has_begun, is_in_the_tower, is_in_the_layers):
        help = model.begin_help(1, prompt, None, 0)
        assert help is not None
        advance(help)
        help.close()
        wait_until(lambda: helper.is_free)
    assert helped_rows(model, prompt) == prompt.length


def test_too_many_layers_are_refused(target_checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="of which the last stays with the target"):
        with helped(target_checkpoint, 99):
            pass
