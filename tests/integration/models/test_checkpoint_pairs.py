"""Both services with small random checkpoints of each kind in fp32: the output is the target's
own."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hippo.models.interface.content import cached_places
from hippo.types import (
    ChatMessage,
    ContentPart,
    Media,
    MediaKind,
    MediaPart,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)
from tests.support.models.families import write_family
from tests.support.models.pairs import NoiseDecoder, Pair, assert_equal_to_target_only, load
from tests.support.running.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until_free,
)

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3)
MEDIA = (
    Media(MediaKind.VIDEO, b"sixsix"),
    Media(MediaKind.VIDEO, b"a longer one"),
    Media(MediaKind.IMAGE, b"one"),
)
VIDEO_FIRST = (MediaPart(0), TextPart("what is in the thing?"))
QUESTION_FIRST = (TextPart("what is in the thing?"), MediaPart(0))
SEVERAL = (MediaPart(0), TextPart("or"), MediaPart(2), MediaPart(1), TextPart("which?"))


def question(content: tuple[ContentPart, ...], **changes: Any) -> OpenRequest:
    media = MEDIA[: sum(isinstance(part, MediaPart) for part in content)]
    messages = (ChatMessage("user", content),)
    return toy_request(messages=messages, media=media, max_tokens=12, end_token_ids=(), **changes)


# Of Qwen's that with all that the others have: M-RoPE, features for several layers, and experts.
# Qwen3.5's layers have a recurrent state.
@pytest.fixture(scope="module", params=["qwen3_vl_moe", "qwen3_5", "llava_onevision", "internvl"])
def family_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair(
        load(write_family(folder / "target", request.param)),
        load(write_family(folder / "draft", request.param, noise=0.02, vocab_size=320)),
    )


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_every_policy_gives_the_target_only_output(
    family_pair: Pair, sampling: SamplingParams
) -> None:
    request = toy_request(
        sampling=sampling, pruning=Pruning(PruningStrategy.NONE), max_tokens=40, end_token_ids=()
    )
    answers = await assert_equal_to_target_only(family_pair, request, policies=POLICIES)
    # A serial policy waits for the draft, which sees all tokens: it is often right.
    assert sum(verdict.num_accepted_tokens for verdict in answers["serial"][0].verdicts) > 8


@pytest.mark.parametrize(
    ("content", "sampling"),
    [(VIDEO_FIRST, SAMPLED), (QUESTION_FIRST, SamplingParams()), (SEVERAL, SAMPLED)],
    ids=["video", "question", "several"],
)
async def test_every_strategy_gives_the_target_only_output(
    family_pair: Pair, content: tuple[ContentPart, ...], sampling: SamplingParams
) -> None:
    request = question(content, sampling=sampling)
    kept: dict[PruningStrategy, tuple[int, ...]] = {}
    async with (
        serving_target(family_pair.target, NoiseDecoder()) as (_, target),
        serving_draft(family_pair.draft, NoiseDecoder()) as (_, draft),
    ):
        alone = await target_only(target, request)
        assert len(alone.token_ids) == 12
        for strategy in PruningStrategy:
            pruned = dataclasses.replace(request, pruning=Pruning(strategy, 0.9, seed=3))
            answer = await relay(draft, target, pruned, "vpsd")
            assert answer.token_ids == alone.token_ids, strategy
            assert answer.blocks, "the draft took no part"
            assert answer.selection is not None
            kept[strategy] = answer.selection.kept_indices
            num_visual = answer.selection.num_visual_tokens
    counts = {strategy: len(indices) for strategy, indices in kept.items()}
    assert counts.pop(PruningStrategy.NONE) == num_visual > 0
    assert counts.pop(PruningStrategy.BLIND) == 0
    assert set(counts.values()) == {num_visual - int(0.9 * num_visual)}
    assert len({kept[strategy] for strategy in counts}) > 2, "strategies choose differently"


async def test_a_draft_at_compacted_positions_gives_the_target_only_output(
    family_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning = Pruning(PruningStrategy.SPECVLM, 0.9, causal_attention=True, compacted_positions=True)
    request = question(VIDEO_FIRST, pruning=pruning)
    prefills = Mock(side_effect=family_pair.draft.prefill)
    async with (
        serving_target(family_pair.target, NoiseDecoder()) as (_, target),
        serving_draft(family_pair.draft, NoiseDecoder()) as (service, draft),
    ):
        alone = await target_only(target, request)
        monkeypatch.setattr(family_pair.draft, "prefill", prefills)
        at_original = dataclasses.replace(pruning, compacted_positions=False)
        for own in (pruning, at_original, pruning):
            asked = dataclasses.replace(request, pruning=own)
            answer = await relay(draft, target, asked, "serial")
            assert answer.token_ids == alone.token_ids and answer.blocks
            await until_free(service)
    selection = answer.selection
    assert selection is not None
    kept = torch.tensor(selection.kept_indices)
    moved, original, again = (call.args[1] for call in prefills.call_args_list)
    num_cached = moved.length - selection.num_visual_tokens + kept.shape[0]
    places = cached_places(moved, kept)
    for prompt in (moved, again):
        assert prompt.next_position == num_cached < original.next_position
        axes = prompt.positions[:, places]
        assert torch.equal(axes, torch.arange(num_cached).expand_as(axes))
    differs = (original.positions != moved.positions).any(0)[places]
    num_reused = prefills.call_args_list[1].kwargs["num_reused"]
    assert num_reused <= int(differs.nonzero()[0])  # no row at another position
