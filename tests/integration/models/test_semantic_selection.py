"""The kept visual tokens leave the target while its prefill runs."""

import dataclasses

import pytest

from hippo.errors import InvalidRequestError, ModelLoadError
from hippo.types import (
    OpenRequest,
    PromptInfo,
    Pruning,
    PruningStrategy,
    Selection,
    SpatialScore,
    Verdict,
)
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.services import serving_target, target_only, text_request, toy_request

SCORED = [
    PruningStrategy.ATTENTION,
    PruningStrategy.HOLISTIC,
    PruningStrategy.SPECVLM,
    PruningStrategy.UV,
]
NUM_TOY_TOKENS = 16


@pytest.mark.parametrize("strategy", SCORED)
async def test_the_selection_is_there_while_the_later_layers_wait(
    strategy: PruningStrategy,
) -> None:
    model = ToyModel()
    async with serving_target(model, score_layers=2) as (_, client):
        model.on_piece = gate = Gate(3)
        async with client.verify(toy_request(pruning=Pruning(strategy, 0.75))) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            selection = await anext(stream)
            assert gate.has_arrived.wait(10)
            assert isinstance(selection, Selection)
            assert len(selection.kept_indices) == 4
            assert list(selection.kept_indices) == sorted(set(selection.kept_indices))
            if strategy in (PruningStrategy.ATTENTION, PruningStrategy.UV):
                assert selection.kept_indices == (12, 13, 14, 15), "those that score highest"
            assert selection.num_visual_tokens == NUM_TOY_TOKENS
            assert selection.score_ns > 0
            gate.open()
            assert isinstance(await anext(stream), Verdict)
    assert model.tapped[-1] == 2


@pytest.mark.parametrize(
    ("request_", "num_kept"),
    [
        (toy_request(pruning=Pruning(PruningStrategy.UNIFORM, 0.5)), 8),
        (toy_request(pruning=Pruning(PruningStrategy.NONE)), 16),
        (toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.0)), 16),
        (toy_request(pruning=Pruning(PruningStrategy.ATTENTION, 0.05)), 16),
        (text_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.9)), 0),
        (text_request(pruning=Pruning(PruningStrategy.SPECVLM, 0.9)), 0),
        (toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.9, min_visual_tokens=17)), 16),
        (toy_request(pruning=Pruning(PruningStrategy.UNIFORM, 0.9, min_visual_tokens=17)), 16),
        (toy_request(pruning=Pruning(PruningStrategy.UNIFORM, 0.5, min_visual_tokens=16)), 8),
    ],
)
async def test_a_choice_that_needs_no_scores_is_said_before_any_device_work(
    request_: OpenRequest, num_kept: int
) -> None:
    model = ToyModel()
    async with serving_target(model) as (_, client):
        model.on_piece = gate = Gate()
        async with client.verify(request_) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            selection = await anext(stream)
            assert isinstance(selection, Selection)
            assert len(selection.kept_indices) == num_kept
            gate.open()
            assert all([isinstance(message, Verdict) async for message in stream])
    assert model.tapped[-1] is None


async def test_a_request_says_how_many_layers_score_and_how() -> None:
    model, kept, tapped = ToyModel(), [], []
    holistic = Pruning(PruningStrategy.HOLISTIC, 0.5)
    async with serving_target(model) as (_, client):
        for pruning in (
            dataclasses.replace(holistic, score_layer_share=1.0),
            dataclasses.replace(holistic, spatial_score=SpatialScore.VARIANCE),
            dataclasses.replace(holistic, spread=1.0),
            holistic,
        ):
            answer = await target_only(client, toy_request(pruning=pruning, max_tokens=1))
            assert answer.selection is not None
            kept.append(answer.selection.kept_indices)
            tapped.append(model.tapped[-1])
    assert tapped == [3, 1, 1, 1]
    assert kept[2] == tuple(range(1, NUM_TOY_TOKENS, 2))  # evenly spaced
    assert len(set(kept)) > 2


async def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="--score-layers is 4, but toy has 3"):
        async with serving_target(ToyModel(), score_layers=4):
            pass


async def test_uv_with_all_layers_is_refused_and_the_service_goes_on() -> None:
    uv = Pruning(PruningStrategy.UV, 0.5, score_layer_share=1.0)
    async with serving_target(ToyModel()) as (_, client):
        with pytest.raises(InvalidRequestError, match="let fewer layers score") as refused:
            await target_only(client, toy_request(pruning=uv))
        assert refused.value.param == "pruning.score_layer_share"
        fewer = dataclasses.replace(uv, score_layer_share=0.5)
        answer = await target_only(client, toy_request(pruning=fewer, max_tokens=1))
        assert answer.selection is not None
    async with serving_target(ToyModel(), score_layers=3) as (_, client):
        with pytest.raises(InvalidRequestError, match="--score-layers of the target"):
            await target_only(client, toy_request(pruning=Pruning(PruningStrategy.UV, 0.5)))


async def test_the_scores_that_a_request_asks_for_are_those_of_the_prefill() -> None:
    model = ToyModel()
    async with serving_target(model) as (_, client):
        for strategy in (PruningStrategy.SPECVLM, PruningStrategy.UV):
            for causal in (False, True):
                pruning = Pruning(strategy, 0.5, causal_attention=causal)
                await target_only(client, toy_request(pruning=pruning, max_tokens=1))
    asked_for = [("visual", False), ("causal", False), ("visual", True), ("visual", True)]
    assert model.taps[-4:] == asked_for
