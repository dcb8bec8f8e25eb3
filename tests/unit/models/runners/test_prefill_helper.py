"""A prefill with a helper leaves what a prefill alone leaves: logits, cache and scores."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hippo.catalog.sizes import chunk_rows_for
from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt, SequenceRows, StepPlan
from hippo.parallel.help_memory import HelpMemory
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper_link import HelperLink
from tests.support.devices.helper import Helper, begin_help, helped_model
from tests.support.models.families import ALL_FAMILIES, HYBRID_FAMILIES, write_family
from tests.support.models.quantized import FORMS, has_packages, write_quantized
from tests.support.models.reference import assert_close, clip, image, prepare, user

IDS = tuple(range(40, 45))
CHUNK_ROWS = 11  # of several chunks, of which the last is shorter


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hippo.catalog.sizes.LEAST_CHUNK_ROWS", CHUNK_ROWS)
    monkeypatch.setattr(HelpedModel, "patience_s", lambda *_: 60.0)


@pytest.fixture(scope="module", params=[f for f in ALL_FAMILIES if f not in HYBRID_FAMILIES])
def helped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HelpedModel, Helper]]:
    """A model of each family whose helper has the first layer."""
    folder = write_family(tmp_path_factory.mktemp("helped") / "tiny", request.param)
    with helped_model(folder, 1) as model:
        yield model


@pytest.fixture
def model(helped: tuple[HelpedModel, Helper]) -> HelpedModel:
    return helped[0]


def prefill(
    model: HelpedModel,
    slot: int,
    prompt: Prompt,
    *,
    tap: AttentionTap | None = None,
) -> torch.Tensor:
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), None, tap)
    assert logits is not None
    return logits


def logits_of(help: PrefillHelp) -> torch.Tensor:
    *_, logits = help.run()
    help.close()
    assert logits is not None
    return logits


def following(model: HelpedModel, slot: int) -> torch.Tensor:
    """The logits of a block, which reads the whole cache of the slot."""
    return model.forward(StepPlan((SequenceRows(slot, 0, IDS),))).clone()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_until_free(model: HelpedModel) -> None:
    helper = model.helper
    assert helper is not None
    wait_until(lambda: helper.is_free)


def several(model: HelpedModel) -> Prompt:
    return prepare(model, user(0, "what is in", 1, "the thing?", 2), clip(), image(), clip(seed=3))


@pytest.mark.parametrize("num_reused", [0, 5])
@pytest.mark.parametrize(
    "tap",
    [None, AttentionTap(1), AttentionTap(1, "causal"), AttentionTap(2)],
    ids=["no scores", "visual", "causal", "scores of the model's own layers too"],
)
def test_help_changes_nothing(
    model: HelpedModel, tap: AttentionTap | None, num_reused: int
) -> None:
    wait_until_free(model)
    prompt = several(model)
    taps = [None if tap is None else dataclasses.replace(tap) for _ in range(2)]
    expected = prefill(model, 0, prompt, tap=taps[0])
    if num_reused:
        prefill(model, 1, prompt)
    help = begin_help(model, 1, prompt, taps[1], num_reused)
    actual = logits_of(help)
    assert help.num_rows == prompt.length - num_reused and help.helper_ns > 0
    assert_close(actual, expected)
    assert_close(following(model, 1), following(model, 0))
    if tap is not None:
        scores = [taps[0].layer_scores, taps[1].layer_scores]  # type: ignore[union-attr]
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-6)


def test_scores_come_before_the_model_has_run_its_last_chunks(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelpMemory, "num_chunks", 64)  # the helper waits for no place
    with helped_model(target_checkpoint, 1) as (model, _):
        prompt, tap = several(model), AttentionTap(1)
        help: Any = begin_help(model, 0, prompt, tap)
        pieces = help.run()
        next(pieces)
        wait_until(lambda: help.help.is_over)
        num_pieces = sum(tap.layer_scores is not None for _ in pieces)
    assert num_pieces > 2  # pieces are run behind the one that has the scores


def test_the_helper_may_have_more_layers_than_are_scored(target_checkpoint: Path) -> None:
    taps = [AttentionTap(1), AttentionTap(1)]
    with helped_model(target_checkpoint, 2) as (model, _):
        prompt = several(model)
        expected = prefill(model, 0, prompt, tap=taps[0])
        help = begin_help(model, 1, prompt, taps[1])
        assert_close(logits_of(help), expected)
        assert help.num_rows == prompt.length
    torch.testing.assert_close(taps[1].layer_scores, taps[0].layer_scores, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(not has_packages(), reason="the group quantized is not installed")
@pytest.mark.parametrize("form", [*FORMS, "nf4", "int8"])
def test_quantised_layers_are_helped(form: str, tmp_path: Path, target_checkpoint: Path) -> None:
    folder, changes = target_checkpoint, {"quantization": form}
    if form in FORMS:
        folder, changes = write_quantized(tmp_path, "Qwen/Qwen2.5-VL-72B-Instruct", form)[0], {}
    with helped_model(folder, 1, max_context_length=1024, **changes) as (model, _):
        prompt = several(model)
        expected = prefill(model, 0, prompt)
        assert_close(logits_of(begin_help(model, 1, prompt)), expected)
        assert_close(following(model, 1), following(model, 0))


@pytest.mark.parametrize("num_given", [0, 1])
def test_inputs_that_cannot_be_given_leave_the_helper_free(
    model: HelpedModel, monkeypatch: pytest.MonkeyPatch, num_given: int
) -> None:
    wait_until_free(model)
    prompt, feeding = several(model), HelperLink.feeding
    calls = [feeding] * num_given + [Mock(side_effect=torch.OutOfMemoryError)]
    monkeypatch.setattr(HelperLink, "feeding", lambda *given: calls.pop(0)(*given))
    help = None
    with pytest.raises(torch.OutOfMemoryError):
        help = model.begin_help(0, prompt, None, 0)
        assert help is not None
        for rows in model.embed_pieces(prompt):
            help.add_features(rows)
    if help is not None:
        help.close()
    wait_until_free(model)


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_the_model_goes_on_alone_when_the_helper_ends(
    target_checkpoint: Path, num_chunks: int
) -> None:
    """It ends behind some chunks, and another one follows it."""
    with helped_model(target_checkpoint, 1) as (model, helper):
        prompt, taps = several(model), [AttentionTap(2), AttentionTap(2)]
        expected = prefill(model, 0, prompt, tap=taps[0])
        helper.num_left = num_chunks
        help = begin_help(model, 1, prompt, taps[1])
        actual = logits_of(help)
        assert model.helper is not None and model.helper.is_lost
        assert help.num_rows == num_chunks * chunk_rows_for(prompt.length)
        assert_close(actual, expected)
        assert_close(following(model, 1), following(model, 0))
        torch.testing.assert_close(taps[1].layer_scores, taps[0].layer_scores, rtol=1e-3, atol=1e-6)
