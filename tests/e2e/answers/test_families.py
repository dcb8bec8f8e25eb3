"""Pairs in their published form, started as ``hippo up`` does.

Each family's services by themselves: tests/integration/models/test_checkpoint_pairs.py. Each
published form: tests/integration/models/test_hub_forms.py. The stack of all other tests here is of
``qwen2_5_vl``.
"""

import signal
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from hippo.cli.stack import StackOptions
from hippo.types import PruningStrategy
from tests.e2e.support import (
    CHAT,
    ask,
    chat_body,
    data_url,
    official_client,
    plain_client,
    streamed,
    text_of,
    wait_until,
    write_clip,
)
from tests.support.models.hub_forms import FAMILY_FORMS, write_hub_form
from tests.support.running.stack import run_stack

# A vision tower and a processor of their own, which the Qwen families share; layers with a state.
FAMILIES = ("internvl", "llava_onevision", "qwen3_5")
SCORED, UNSCORED = PruningStrategy.HOLISTIC, PruningStrategy.UNIFORM
LONG = 1000  # tokens; an answer that is not over before a draft on a busy machine is ready


def options_for(family: str, folder: Path) -> StackOptions:
    """A small pair in the family's published form, in float32."""
    name = FAMILY_FORMS[family]
    # Slots for earlier answers too, which a draft on a busy machine may free late.
    arguments = ("--slots", "8", "--max-context-length", "8192", "--num-threads", "1")
    return StackOptions(
        target_model=str(write_hub_form(folder / "target", name)),
        draft_model=str(write_hub_form(folder / "draft", name, noise=0.02)),
        dtype="float32",
        port=0,
        target_args=arguments,
        draft_args=arguments,
        gateway_args=("--calibration-share", "0"),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_pair_gives_the_targets_own_answers(family: str, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4", num_frames=4)

    def answer(client: openai.OpenAI, num_tokens: int = 64, **speculative: Any) -> Any:
        # Of a clip that it knows, the target would tell all before the draft has read its tokens.
        new = {"cache_salt": uuid.uuid4().hex}
        extra = {"speculative": speculative, "ignore_eos": True, **new}
        return ask(client, data_url(clip), max_tokens=num_tokens, extra_body=extra)

    with (
        run_stack(options_for(family, tmp_path)) as running,
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


def test_an_answer_survives_a_draft_with_states_and_takes_it_back(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4", num_frames=4)
    with (
        run_stack(options_for("qwen3_5", tmp_path)) as running,
        plain_client(running.url) as http,
    ):
        body = chat_body(data_url(clip), LONG, speculative={"policy": "off"})
        expected = http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        target = running.stack.child("target")

        def lose_the_draft() -> None:
            draft = running.stack.child("draft")
            draft.send_signal(signal.SIGKILL)
            draft.wait(10)
            # Held, so that the answer is not over before the draft is back.
            target.send_signal(signal.SIGSTOP)
            running.stack.start_service("draft")
            wait_until(lambda: running.metric("draft", "hippo_slots") == 8)
            target.send_signal(signal.SIGCONT)

        chunks = streamed(http, body | {"speculative": {"policy": "optimistic"}}, lose_the_draft)
        figures = chunks[-1]["hippo"]
        assert text_of(chunks) == expected
        assert (figures["num_draft_losses"], figures["num_draft_streams"]) == (1, 2)
        again = http.post(CHAT, json=body | {"speculative": {"policy": "adaptive"}}).json()
        assert again["choices"][0]["message"]["content"] == expected
