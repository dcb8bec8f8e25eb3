"""Options that shape an answer, asked for by the official client of real processes."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.support import GREEDY, SAMPLED, Running, ask, data_url, wait_until


def _answer(client: openai.OpenAI, clip: Path, policy: str = "adaptive", **fields: Any) -> Any:
    extra = {"speculative": {"policy": policy}, **fields.pop("extra_body", {})}
    return ask(client, data_url(clip), extra_body=extra, **({"max_tokens": 40} | fields))


@pytest.mark.parametrize(("policy", "sampling"), [("vpsd", GREEDY), ("adaptive", SAMPLED)])
def test_every_choice_is_the_targets_own_and_the_first_is_that_of_one(
    client: openai.OpenAI, clip: Path, policy: str, sampling: dict[str, Any]
) -> None:
    fields = {**sampling, "max_tokens": 24, "extra_body": {"return_token_ids": True}}
    fields |= {"logprobs": True, "top_logprobs": 3}
    single = _answer(client, clip, "off", **fields)
    alone = _answer(client, clip, "off", n=3, **fields)
    pair = _answer(client, clip, policy, n=3, **fields)
    texts = [choice.message.content for choice in pair.choices]
    assert texts == [choice.message.content for choice in alone.choices]
    assert texts[0] == single.choices[0].message.content
    assert (len(set(texts)) == 1) == (sampling is GREEDY)
    assert [choice.index for choice in pair.choices] == [0, 1, 2]
    told, expected = (
        [one for choice in answer.choices for one in choice.logprobs.content]
        for answer in (pair, alone)
    )
    assert b"".join(bytes(one.bytes) for one in told).decode(errors="replace") == "".join(texts)
    for one, other in zip(told, expected, strict=True):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        likely = [each.logprob for each in one.top_logprobs]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True)
        assert one.logprob <= likely[0] <= 0.0
        assert sampling is SAMPLED or one.top_logprobs[0].token == one.token
    assert pair.usage.prompt_tokens == single.usage.prompt_tokens
    num_tokens = sum(len(choice.model_extra["token_ids"]) for choice in pair.choices)
    assert pair.usage.completion_tokens == alone.usage.completion_tokens == num_tokens
    figures = [choice.model_extra["hippo"] for choice in pair.choices]
    assert {one["policy"] for one in figures} == {policy}
    assert pair.model_extra["hippo"] == figures[0]


def test_streamed_choices_are_told_apart_by_their_index(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    fields = {**SAMPLED, "n": 3, "max_tokens": 24, "logprobs": True, "stop": [" b", "zq", "o"]}
    whole = _answer(client, clip, **fields)
    assert "stop" in [choice.finish_reason for choice in whole.choices]
    assert not any("o" in choice.message.content for choice in whole.choices)
    wait_until(lambda: running.slots_used() == 0)  # the services learn of a stop after the client
    options = {"include_usage": True}
    chunks = list(_answer(client, clip, stream=True, stream_options=options, **fields))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    figures = [each.model_extra["hippo"] for each in chunks if "hippo" in each.model_extra]
    assert len(figures) == 3 and all(each["num_forwards"] >= 1 for each in figures)
    for expected in whole.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == expected.index]
        assert "".join(each.delta.content or "" for each in own) == expected.message.content
        assert own[0].delta.role == "assistant"
        told = [each for each in own if each.logprobs]
        assert all(each.delta.content for each in told)  # each stands with the text it begins in
        tokens = [one.token for each in told for one in each.logprobs.content]
        assert tokens == [one.token for one in expected.logprobs.content]
        reasons = [each.finish_reason for each in own if each.finish_reason]
        assert reasons == [expected.finish_reason]
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens

    long = {**SAMPLED, "n": 2, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with _answer(client, clip, stream=True, **long) as stream:  # which the client leaves
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    wait_until(lambda: running.slots_used() == 0)


def test_more_choices_than_there_is_room_for_are_refused_and_leave_nothing_behind(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    wait_until(lambda: running.slots_used() == 0)
    with pytest.raises(openai.RateLimitError, match="slots"):  # 2 slots and 2 places in the queue
        _answer(client, clip, n=5, **GREEDY)
    wait_until(lambda: running.slots_used() == 0)
    assert len(_answer(client, clip, n=4, max_tokens=4, **GREEDY).choices) == 4
