"""The promise: whatever policy and family, the answer is the target's own, token for token."""

import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from hippo.cli.stack import StackOptions
from hippo.types import PruningStrategy
from tests.e2e.support import GREEDY, SAMPLED, Running, ask, data_url, official_client, write_clip
from tests.support.models.hub_forms import FAMILY_FORMS, write_hub_form
from tests.support.running.stack import run_stack

PENALISED = {**SAMPLED, "frequency_penalty": 0.4, "presence_penalty": 0.2, "top_p": 0.95}
NUM_TOKENS, FEW = 64, 32


def _answer(client: openai.OpenAI, clip: Path, speculative: Any, **fields: Any) -> Any:
    extra = {"speculative": speculative, "ignore_eos": True}
    if "top_p" in fields:
        extra |= {"top_k": 40, "repetition_penalty": 1.1}
    return ask(client, data_url(clip), extra_body=extra, **{"max_tokens": NUM_TOKENS, **fields})


@pytest.fixture(scope="module")
def alone(running: Running) -> str:
    """The target's own greedy answer, its first tokens."""
    with official_client(running.url) as client:
        answer = _answer(client, running.clip, {"policy": "off"}, max_tokens=FEW)
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "T", "penalties"])
def test_every_policy_gives_the_targets_own_answer(
    client: openai.OpenAI, clip: Path, sampling: dict[str, Any]
) -> None:
    alone = _answer(client, clip, {"policy": "off"}, **sampling)
    for policy in ("serial", "vpsd", "optimistic", "conservative", "adaptive"):
        pair = _answer(client, clip, {"policy": policy}, **sampling)
        assert pair.choices[0].message.content == alone.choices[0].message.content, policy
        assert pair.usage.total_tokens == alone.usage.total_tokens, policy
        figures = pair.model_extra["hippo"]
        assert figures["num_draft_streams"] == 1 and figures["draft_problem"] is None, policy
        # The adaptive policy may wait for nothing that this draft, never right, has to say.
        assert figures["draft_used"] or policy == "adaptive"


def test_the_answer_does_not_depend_on_what_the_draft_sees(
    client: openai.OpenAI, clip: Path, alone: str
) -> None:
    for strategy in (strategy.value for strategy in PruningStrategy):
        pruning = {"strategy": strategy, "ratio": 0.7, "seed": 3}
        pair = _answer(client, clip, {"policy": "optimistic", "pruning": pruning}, max_tokens=FEW)
        assert pair.choices[0].message.content == alone, strategy
        assert pair.model_extra["hippo"]["pruning"]["strategy"] == strategy


@pytest.mark.parametrize(
    ("preset", "policy", "strategy"),
    [("hippo", "vpsd", "holistic"), ("specvlm", "serial", "specvlm")],
)
def test_each_preset_is_its_system_and_gives_the_targets_own_answer(
    client: openai.OpenAI, clip: Path, alone: str, preset: str, policy: str, strategy: str
) -> None:
    pair = _answer(client, clip, {"preset": preset}, max_tokens=FEW)
    assert pair.choices[0].message.content == alone
    figures = pair.model_extra["hippo"]
    assert (figures["policy"], figures["pruning"]["strategy"]) == (policy, strategy)
    visual = figures["pruning"]["num_visual_tokens"]
    assert figures["pruning"]["num_kept_tokens"] == visual - int(0.9 * visual)


# A vision tower and a processor of their own; the Qwen families share theirs.
FAMILIES = ("internvl", "llava_onevision")
SCORED, UNSCORED = PruningStrategy.HOLISTIC, PruningStrategy.UNIFORM
LONG = 1000  # tokens; an answer that is not over before a draft on a busy machine is ready


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_pair_gives_the_targets_own_answers(family: str, tmp_path: Path) -> None:
    name, clip = FAMILY_FORMS[family], write_clip(tmp_path / "clip.mp4", num_frames=4)
    # Slots for earlier answers too, which a draft on a busy machine may free late.
    arguments = ("--slots", "8", "--max-context-length", "8192", "--num-threads", "1")
    options = StackOptions(
        target_model=str(write_hub_form(tmp_path / "target", name)),
        draft_model=str(write_hub_form(tmp_path / "draft", name, noise=0.02)),
        dtype="float32",
        port=0,
        target_args=arguments,
        draft_args=arguments,
        gateway_args=("--calibration-share", "0"),
    )

    def answer(client: openai.OpenAI, num_tokens: int = 64, **speculative: Any) -> Any:
        # Of a clip that it knows, the target would tell all before the draft has read its tokens.
        new = {"cache_salt": uuid.uuid4().hex}
        extra = {"speculative": speculative, "ignore_eos": True, **new}
        return ask(client, data_url(clip), max_tokens=num_tokens, extra_body=extra)

    with run_stack(options) as running, official_client(running.url) as client:
        alone = answer(client, policy="off").choices[0].message.content
        assert answer(client, policy="adaptive").choices[0].message.content == alone
        num_draft_tokens = 0
        for strategy in (SCORED, UNSCORED):
            pruning = {"strategy": strategy.value, "ratio": 0.9, "seed": 3}
            pair = answer(client, policy="serial", pruning=pruning)
            assert pair.choices[0].message.content == alone, strategy
            figures = pair.model_extra["hippo"]
            num_draft_tokens += figures["num_draft_tokens"]
            assert figures["pruning"]["strategy"] == strategy.value
            assert figures["draft_problem"] is None, strategy
        if not num_draft_tokens:
            pair = answer(client, LONG, policy="serial")
            num_draft_tokens = pair.model_extra["hippo"]["num_draft_tokens"]
        assert num_draft_tokens > 0
