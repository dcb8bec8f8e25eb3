"""Services of a target with a prefill helper: the answers are the target's own."""

from pathlib import Path

import pytest

from hippo.parallel.helped import HelpedModel
from hippo.types import Media, MediaKind, Pruning, PruningStrategy, SamplingParams
from tests.support.devices.helper import helped_model
from tests.support.models.pairs import NoiseDecoder, assert_equal_to_target_only, load
from tests.support.running.services import POLICIES, serving_target, target_only, toy_request

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_drafted_answers_are_helped_and_equal_to_unaided_ones(
    target_checkpoint: Path,
    draft_checkpoint: Path,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hippo.catalog.sizes.LEAST_CHUNK_ROWS", 11)
    monkeypatch.setattr(HelpedModel, "patience_s", lambda *_: 60.0)
    asked = toy_request(
        media=(Media(MediaKind.VIDEO, b"x" * 30),),
        sampling=sampling,
        pruning=Pruning(PruningStrategy.HOLISTIC, 0.5, min_visual_tokens=1),
        max_tokens=24,
        end_token_ids=(),
    )
    drafted = [policy for policy in POLICIES if policy != "off"]
    with helped_model(target_checkpoint, 2) as (model, _):
        answers = await assert_equal_to_target_only(
            (model, load(draft_checkpoint)), asked, policies=drafted, prefix_cache=False
        )
        async with serving_target(model, NoiseDecoder()) as (_, client):
            alone = await target_only(client, asked)
    assert alone.verdicts[0].timing.helper_ns == 0
    for policy in drafted:
        (answer,) = answers[policy]
        assert answer.verdicts[0].timing.helper_ns > 0, policy
        assert answer.selection is not None
    assert answers["serial"][0].blocks  # where the target waits for the draft
