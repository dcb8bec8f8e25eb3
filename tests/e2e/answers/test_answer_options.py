"""Options that shape an answer, asked for by the official client of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.support import GREEDY, SAMPLED, Running, ask, data_url, wait_until

# Bytes and words that any answer of the pair is likely to have early.
COMMON = [" ", "e", "a", "t"]


def _answer(client: openai.OpenAI, clip: Path, policy: str = "adaptive", **fields: Any) -> Any:
    extra = {"speculative": {"policy": policy}, **fields.pop("extra_body", {})}
    return ask(client, data_url(clip), extra_body=extra, **({"max_tokens": 40} | fields))


@pytest.mark.parametrize(
    ("policy", "sampling"), [("off", GREEDY), ("vpsd", SAMPLED), ("adaptive", GREEDY)]
)
def test_nothing_ends_an_answer_before_min_tokens(
    client: openai.OpenAI, clip: Path, policy: str, sampling: dict[str, Any]
) -> None:
    ids = _answer(client, clip, **sampling, max_tokens=8, extra_body={"return_token_ids": True})
    ends = list(dict.fromkeys(ids.choices[0].model_extra["token_ids"]))
    extra = {"stop_token_ids": ends, "return_token_ids": True}
    short = _answer(client, clip, policy, **sampling, stop=COMMON, extra_body=extra)
    assert short.usage.completion_tokens == 1
    long = _answer(
        client, clip, policy, **sampling, stop=COMMON, extra_body={**extra, "min_tokens": 24}
    )
    alone = _answer(
        client, clip, "off", **sampling, stop=COMMON, extra_body={**extra, "min_tokens": 24}
    )
    assert long.usage.completion_tokens >= 24
    assert not set(long.choices[0].model_extra["token_ids"][:24]) & set(ends)
    assert long.choices[0].message.content == alone.choices[0].message.content
    assert long.choices[0].model_extra == alone.choices[0].model_extra


def test_min_tokens_beyond_the_limit_are_refused_by_name(client: openai.OpenAI, clip: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens is 50, more than max_tokens"):
        _answer(client, clip, max_tokens=40, extra_body={"min_tokens": 50})


@pytest.mark.parametrize(("policy", "sampling"), [("vpsd", GREEDY), ("adaptive", SAMPLED)])
def test_log_probabilities_are_the_targets_own_whatever_the_policy(
    client: openai.OpenAI, clip: Path, policy: str, sampling: dict[str, Any]
) -> None:
    fields = {**sampling, "logprobs": True, "top_logprobs": 3}
    alone = _answer(client, clip, "off", **fields).choices[0]
    pair = _answer(client, clip, policy, **fields).choices[0]
    assert pair.message.content == alone.message.content
    data = b"".join(bytes(one.bytes) for one in pair.logprobs.content)
    assert data.decode(errors="replace") == pair.message.content
    for one, other in zip(pair.logprobs.content, alone.logprobs.content, strict=True):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top_logprobs) == 3
        likely = [each.logprob for each in one.top_logprobs]
        assert likely == sorted(likely, reverse=True) and one.logprob <= likely[0] <= 0.0
        if sampling is GREEDY:
            assert one.top_logprobs[0].token == one.token


def test_streamed_log_probabilities_are_those_of_the_whole_answer(
    client: openai.OpenAI, clip: Path
) -> None:
    fields: dict[str, Any] = {**GREEDY, "logprobs": True, "stop": ["zq", "e"], "max_tokens": 60}
    whole = _answer(client, clip, extra_body={"min_tokens": 20}, **fields).choices[0]
    chunks = list(_answer(client, clip, extra_body={"min_tokens": 20}, stream=True, **fields))
    entries = [
        one
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.message.content
    assert [one.token for one in entries] == [one.token for one in whole.logprobs.content]
    assert all(one.top_logprobs == [] for one in entries)
    for chunk in chunks:  # each stands with the text that it begins in
        if chunk.choices and chunk.choices[0].logprobs:
            assert chunk.choices[0].delta.content


def test_answers_without_log_probabilities_say_so(client: openai.OpenAI, clip: Path) -> None:
    assert _answer(client, clip, max_tokens=4).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        _answer(client, clip, top_logprobs=2)


@pytest.mark.parametrize(("policy", "sampling"), [("vpsd", GREEDY), ("adaptive", SAMPLED)])
def test_every_choice_is_the_targets_own_and_the_first_is_that_of_one(
    client: openai.OpenAI, clip: Path, policy: str, sampling: dict[str, Any]
) -> None:
    fields = {**sampling, "max_tokens": 24}
    single = _answer(client, clip, "off", **fields)
    alone = _answer(client, clip, "off", n=3, **fields)
    pair = _answer(client, clip, policy, n=3, **fields)
    texts = [choice.message.content for choice in pair.choices]
    assert texts == [choice.message.content for choice in alone.choices]
    assert texts[0] == single.choices[0].message.content
    assert (len(set(texts)) == 1) == (sampling is GREEDY)
    assert [choice.index for choice in pair.choices] == [0, 1, 2]
    assert pair.usage.prompt_tokens == single.usage.prompt_tokens
    assert pair.usage.completion_tokens == alone.usage.completion_tokens
    figures = [choice.model_extra["hippo"] for choice in pair.choices]
    assert {one["policy"] for one in figures} == {policy}
    assert pair.model_extra["hippo"] == figures[0]


def test_choices_that_begin_together_share_one_prefill(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    wait_until(lambda: running.slots_used() == 0)
    extra = {"cache_salt": "choices", "return_token_ids": True}
    answer = _answer(client, clip, "off", n=2, **SAMPLED, max_tokens=30, extra_body=extra)
    num_prompt = answer.usage.prompt_tokens
    cached = sorted(
        choice.model_extra["hippo"]["num_cached_tokens"]["target"] for choice in answer.choices
    )
    assert cached == [0, num_prompt - 1]
    counts = [len(choice.model_extra["token_ids"]) for choice in answer.choices]
    assert answer.usage.completion_tokens == sum(counts)


def test_streamed_choices_are_told_apart_by_their_index(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    fields = {**SAMPLED, "n": 3, "max_tokens": 24, "logprobs": True, "stop": [" b", "zq", "o"]}
    whole = _answer(client, clip, **fields)
    assert "stop" in [choice.finish_reason for choice in whole.choices]
    assert not any("o" in choice.message.content for choice in whole.choices)
    wait_until(lambda: running.slots_used() == 0)  # the services learn of a stop after the client
    chunks = list(
        _answer(client, clip, stream=True, stream_options={"include_usage": True}, **fields)
    )
    texts, tokens = ["", "", ""], [0, 0, 0]
    reasons: list[str | None] = [None, None, None]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [len(choice.logprobs.content) for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_client_that_leaves_frees_the_slots_of_all_choices(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    stream = _answer(
        client, clip, n=2, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}, **SAMPLED
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    stream.close()
    wait_until(lambda: running.slots_used() == 0)


def test_more_choices_than_there_is_room_for_are_refused_and_leave_nothing_behind(
    client: openai.OpenAI, running: Running, clip: Path
) -> None:
    wait_until(lambda: running.slots_used() == 0)
    with pytest.raises(openai.BadRequestError, match="n is 9; this server gives at most 8"):
        _answer(client, clip, n=9)
    with pytest.raises(openai.RateLimitError, match="slots"):  # 2 slots and 2 places in the queue
        _answer(client, clip, n=5, **GREEDY)
    wait_until(lambda: running.slots_used() == 0)
    assert len(_answer(client, clip, n=4, max_tokens=4, **GREEDY).choices) == 4
