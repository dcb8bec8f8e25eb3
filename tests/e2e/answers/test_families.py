"""Pairs in their published form, started as ``hippo up`` does.

Each family's services by themselves: tests/integration/models/test_checkpoint_pairs.py. Each
published form: tests/integration/models/test_hub_forms.py. The stack of all other tests here is of
``qwen2_5_vl``.
"""

import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from hippo.cli.stack import StackOptions
from hippo.types import PruningStrategy
from tests.e2e.support import ask, data_url, official_client, write_clip
from tests.support.models.hub_forms import FAMILY_FORMS, write_hub_form
from tests.support.running.stack import run_stack

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

    with (
        run_stack(options) as running,
        official_client(running.url) as client,
    ):
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
