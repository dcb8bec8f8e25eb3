"""A slot that caches less than the context: a draft's, for pruned prompts. Float32."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hippo.engine.warmup import longest_prompt, run_longest, warm_prompt, warm_up
from hippo.errors import ContextLengthError
from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt
from tests.support.devices.flash_operator import flash_operator
from tests.support.devices.graphs import RecordedGraphs, runner_of
from tests.support.models.families import write_family
from tests.support.models.pairs import load
from tests.support.models.reference import clip, prefill, prepare, step, user

CACHE_TOKENS = 96
NUM_FRAMES = 24


class Lengths(NamedTuple):
    """One checkpoint, whose slots cache the whole context, and less."""

    whole: CachedModel
    short: CachedModel
    prompt: Prompt  # longer than a slot of ``short``


# The latter two have text between frames, which is never pruned.
@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_onevision", "qwen3_vl", "internvl"])
def lengths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lengths:
    folder = write_family(tmp_path_factory.mktemp("family") / "tiny", request.param)
    whole = load(folder)
    prompt = prepare(whole, user(0, "what?"), clip(num_frames=NUM_FRAMES))
    num_visual = int(prompt.visual_indices.shape[0])
    short = load(folder, cache_tokens=prompt.length - num_visual + 30)
    assert short.info.max_context_length == whole.info.max_context_length == 512
    assert short.info.slot_tokens < prompt.length < whole.info.slot_tokens == 512
    return Lengths(whole, short, prompt)


def kept_for(prompt: Prompt, num_cached: int) -> torch.Tensor:
    """Evenly spaced visual tokens, with which the pruned prompt has ``num_cached``."""
    num_visual = int(prompt.visual_indices.shape[0])
    count = num_cached - (prompt.length - num_visual)
    assert 0 < count < num_visual
    return torch.arange(count) * num_visual // count


def test_a_pruned_prompt_keeps_the_positions_of_the_whole_one(lengths: Lengths) -> None:
    kept = kept_for(lengths.prompt, lengths.short.info.slot_tokens - 10)
    block = step(1, 0, 5, 6, 7)
    whole, short = (
        torch.cat((prefill(model, 1, lengths.prompt, kept)[None], model.forward(block)))
        for model in lengths[:2]
    )
    torch.testing.assert_close(short, whole)


def test_a_prompt_of_exactly_a_slots_length_leaves_no_room_for_an_answer(lengths: Lengths) -> None:
    model, prompt, length = lengths.short, lengths.prompt, lengths.short.info.slot_tokens
    message = f"of {length} cached tokens leaves no room in the {length} tokens that a slot"
    with pytest.raises(ContextLengthError, match=message):
        prefill(model, 0, prompt, kept_for(prompt, length))
    prefill(model, 0, prompt, kept_for(prompt, length - 1))
    model.forward(step(0, 0, 5))
    with pytest.raises(ContextLengthError, match=f"{length + 1} tokens do not fit in"):
        model.forward(step(0, 1, 6))


def test_a_prompt_of_exactly_the_context_is_refused_and_a_shorter_one_has_one_more_row(
    lengths: Lengths,
) -> None:
    model = lengths.whole
    most = "x" * (511 - prepare(model, user("")).length)  # a token a letter
    with pytest.raises(ContextLengthError, match=r"512 tokens long.*context of 512"):
        prepare(model, user(f"{most}x"))
    prompt = prepare(model, user(most))
    assert prompt.length == 511
    prefill(model, 0, prompt)
    model.forward(step(0, 0, 5))
    with pytest.raises(ContextLengthError, match="513 tokens do not fit in a context of 512"):
        model.forward(step(0, 1, 6))


def test_a_service_starts_with_prompts_that_have_room(lengths: Lengths) -> None:
    model = lengths.short
    prompt = warm_prompt(model)
    warm_up(model, prompt, slot=0)
    longest = longest_prompt(model, prompt)
    assert longest.length > prompt.length and longest.length > model.info.slot_tokens
    run_longest(model, longest, slot=1, num_tapped=0)


def test_graphs_are_as_long_as_a_slot(target_checkpoint: Path) -> None:
    model = load(target_checkpoint, cache_tokens=CACHE_TOKENS, exact_rows=32)
    with flash_operator():
        runner = runner_of(model, RecordedGraphs().capture_graph)
        assert list(runner.capture_all(model._rotary_table))
    assert runner._capture is not None, "a replay differed"
    assert {shape.capacity for shape in runner._steps} == {CACHE_TOKENS}
