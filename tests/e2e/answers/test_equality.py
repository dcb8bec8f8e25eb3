"""The promise: whatever the policy, the answer is the target's own, token for token."""

from pathlib import Path
from typing import Any

import openai
import pytest

from hippo.types import PruningStrategy
from tests.e2e.support import GREEDY, SAMPLED, Running, ask, data_url, official_client

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
