"""A pair of each family in its published form, started as ``hippo up`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from hippo.cli.stack import StackOptions
from hippo.types import PruningStrategy
from tests.e2e.support import ask, data_url, write_clip
from tests.support.hub_forms import FAMILY_FORMS, write_hub_form
from tests.support.stack import run_stack

POLICIES = ("serial", "vpsd", "optimistic", "conservative", "adaptive")


@pytest.mark.parametrize("family", FAMILY_FORMS)
def test_a_published_pair_gives_the_targets_own_answers(family: str, tmp_path: Path) -> None:
    name, clip = FAMILY_FORMS[family], write_clip(tmp_path / "clip.mp4")
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

    def answer(client: openai.OpenAI, **speculative: Any) -> Any:
        extra = {"speculative": speculative, "ignore_eos": True}
        return ask(client, data_url(clip), max_tokens=64, extra_body=extra)

    with (
        run_stack(options) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        alone = answer(client, policy="off").choices[0].message.content
        for policy in POLICIES:
            assert answer(client, policy=policy).choices[0].message.content == alone, policy
        num_draft_tokens = 0
        for strategy in PruningStrategy:
            pruning = {"strategy": strategy.value, "ratio": 0.9, "seed": 3}
            pair = answer(client, policy="serial", pruning=pruning)
            assert pair.choices[0].message.content == alone, strategy
            figures = pair.model_extra["hippo"]
            num_draft_tokens += figures["num_draft_tokens"]
            assert figures["pruning"]["strategy"] == strategy.value
            assert figures["draft_problem"] is None, strategy
        for _ in range(20):  # a draft on a busy machine may be ready when the answer has ended
            if not num_draft_tokens:
                pair = answer(client, policy="serial")
                num_draft_tokens = pair.model_extra["hippo"]["num_draft_tokens"]
        assert num_draft_tokens > 0
