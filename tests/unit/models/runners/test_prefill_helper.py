"""A prefill with a helper leaves what a prefill alone leaves: logits, cache and scores."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt, SequenceRows, StepPlan
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_parts
from hippo.parallel.help import HelpWith
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper import layer_shape
from hippo.parallel.helper_link import HelperLink
from tests.support.devices.helper import MemoryLink, begin_help, helped_model
from tests.support.models.families import ALL_FAMILIES, HYBRID_FAMILIES, write_family
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
) -> Iterator[tuple[HelpedModel, MemoryLink]]:
    """A model of each family whose helper has the first layer."""
    folder = write_family(tmp_path_factory.mktemp("helped") / "tiny", request.param)
    with helped_model(folder, 1) as model:
        yield model


@pytest.fixture
def model(helped: tuple[HelpedModel, MemoryLink]) -> HelpedModel:
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


def wait_until_free(model: HelpedModel) -> None:
    assert model.helper is not None
    deadline = time.monotonic() + 20
    while not model.helper.is_free:
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


def test_scores_come_before_the_model_has_run_its_last_chunks(model: HelpedModel) -> None:
    wait_until_free(model)
    prompt, tap = several(model), AttentionTap(1)
    pieces = begin_help(model, 0, prompt, tap).run()
    next(pieces)
    wait_until_free(model)  # the helper has sent all
    num_pieces = sum(tap.layer_scores is not None for _ in pieces)
    assert num_pieces > 2  # pieces are run behind the one that has the scores


def test_inputs_that_cannot_be_made_end_the_helper(target_checkpoint: Path) -> None:
    loaded, _ = load_parts(LoadPlan(str(target_checkpoint), max_context_length=64))
    end_helper = Mock()
    link: Any = MemoryLink(SimpleQueue(), SimpleQueue())
    helper = HelperLink(link, layer_shape(loaded), Mock(), end_helper)
    help = helper.begin(HelpWith(0, 0, 8, 8, 0, 0, ()))
    assert help is not None
    helper.feed(help, Mock(side_effect=torch.OutOfMemoryError))
    end_helper.assert_called_once()
    assert helper.is_lost


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_the_model_goes_on_alone_when_the_helper_ends(
    target_checkpoint: Path, num_chunks: int
) -> None:
    """The link breaks behind some chunks."""
    with helped_model(target_checkpoint, 1) as (model, link):
        goes_on_alone(model, link, num_chunks)


def goes_on_alone(model: HelpedModel, link: MemoryLink, num_chunks: int) -> None:
    prompt, taps = several(model), [AttentionTap(2), AttentionTap(2)]
    expected = prefill(model, 0, prompt, tap=taps[0])
    num_sent = 0

    def count() -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1 + num_chunks * 3:
            link._outgoing.put(RuntimeError("the other process has ended"))

    link.before_send = count
    help = begin_help(model, 1, prompt, taps[1])
    actual = logits_of(help)
    link.before_send = lambda: None
    assert model.helper is not None and model.helper.is_lost
    assert help.num_rows < prompt.length
    assert_close(actual, expected)
    assert_close(following(model, 1), following(model, 0))
    torch.testing.assert_close(taps[1].layer_scores, taps[0].layer_scores, rtol=1e-3, atol=1e-6)
