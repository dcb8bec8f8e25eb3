"""Options that shape an answer, asked for by the official client of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.support import GREEDY, SAMPLED, data_url, video_message

# Bytes and words that any answer of the pair is likely to have early.
COMMON = [" ", "e", "a", "t"]


def _answer(client: openai.OpenAI, clip: Path, policy: str = "adaptive", **fields: Any) -> Any:
    extra = {"speculative": {"policy": policy}, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        model="hippo",
        messages=[video_message(data_url(clip))],  # type: ignore[list-item]
        extra_body=extra,
        **({"max_tokens": 40} | fields),
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T"])
@pytest.mark.parametrize("policy", ["off", "vpsd", "adaptive"])
def test_nothing_ends_an_answer_before_min_tokens(
    client: openai.OpenAI, clip: Path, policy: str, sampling: dict[str, Any]
) -> None:
    ids = _answer(client, clip, **sampling, extra_body={"return_token_ids": True})
    ends = list(dict.fromkeys(ids.choices[0].model_extra["token_ids"][:8]))
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
