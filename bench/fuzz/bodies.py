"""Bodies of chat completions with odd values in odd places."""

from __future__ import annotations

import base64
import copy
import io
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from bench.fuzz.mutate import mutated


def good_bodies() -> list[dict[str, Any]]:
    """Requests that use every field that changes an answer."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    frame = base64.b64encode(buffer.getvalue()).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{frame}"}}
    frames = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frame},{frame}"}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{frame}"}}
    text = {"type": "text", "text": "What happens?"}
    plain = {"model": "hippo", "messages": [{"role": "user", "content": "Hello"}]}
    return [
        plain,
        {
            **plain,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [video, image, text]},
                {"role": "assistant", "content": "Nothing."},
                {"role": "user", "content": "Sure?"},
            ],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 3,
            "max_tokens": 20,
            "min_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "seed": 7,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -1.5},
            "stop": ["END", "."],
            "stop_token_ids": [4],
        },
        {
            **plain,
            "messages": [{"role": "user", "content": [frames, text]}],
            "media_io_kwargs": {
                "video": {"fps": 10, "frames_indices": [0, 5], "total_num_frames": 20}
            },
            "mm_processor_kwargs": {"max_pixels": 100000},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 9,
        },
        {
            **plain,
            "cache_salt": "mine",
            "ignore_eos": True,
            "return_token_ids": True,
            "return_timeline": True,
            "mm_processor_kwargs": {"fps": 2, "min_frames": 4, "num_frames": 16},
            "speculative": {
                "policy": "vpsd",
                "gamma": 4,
                "max_draft_tokens": 8,
                "pruning": {
                    "strategy": "holistic",
                    "ratio": 0.5,
                    "seed": 3,
                    "min_visual_tokens": 10,
                },
            },
            "user": "someone",
            "metadata": {"a": "b"},
        },
    ]


_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, -1e308),
    *(10**30, 2**31, 2**63, 2**64, -(2**63), float("nan"), float("inf"), -float("inf")),
    *("", "x", "x" * 5000, "\0", "\ud800", "é\u202e\U0001f9db", "{field}", "%s%n"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}}, ["x"] * 40, {"9" * 5000: 1}),
    *("video-" + "0" * 32, "user", "robot", "1e5", "0x10", "-0"),
)
_ODD_KEYS = (
    *("tools", "functions", "beam_width", "\ud800", ""),
    *("9" * 5000, "\u0669", "-1", "1.5"),
)
_ODD_URLS = (
    *("data:video/jpeg;base64,,,", "data:video/jpeg;base64," + "," * 3000),
    *("data:video/mp4;base64,AAAA", "data:video/mp4;base64,%", "data:,", "data:", ":", "//", "/"),
    *("file:///etc/passwd", "file://\0", "file://[", "/\ud800", "/" + "x" * 5000, "video-\0"),
    *("http://[::1", "https://[::1]:1/a", "https://a:b@c/", "http://127.0.0.1:99999/"),
    *("http://127.0.0.1:1/" + "x" * 70_000, "http://127.0.0.1:1/\0", "http://127.0.0.1:1/a b\n"),
    *("http://127.0.0.1.:1", "HTTP://127.0.0.1:1?#", "http://\u2100.example/", "http://\ud800/"),
    *("http://127.0.0.1:1/\ud800", "http://127.0.0.1:-1/", "http://" + "\u00e9" * 70 + "/"),
)


def make_body(
    rng: random.Random, bodies: Sequence[dict[str, Any]], texts: Sequence[bytes]
) -> bytes:
    """One body: a good one with odd values in up to four places, one in eight also cut up."""
    body: Any = copy.deepcopy(rng.choice(bodies))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        body = _changed(rng, body, bodies)
    if rng.random() < 0.002:
        return b'{"model":' + b"[" * rng.choice((900, 1100, 100_000)) + b"1" * rng.choice((1, 5000))
    data = json.dumps(body).encode()
    return mutated(rng, data, texts) if rng.random() < 1 / 8 else data


def _changed(rng: random.Random, body: Any, bodies: Sequence[dict[str, Any]]) -> Any:
    """``body`` with a value replaced, taken away, added or doubled, somewhere in it."""
    places = list(_places(body))
    if not places or rng.random() < 0.01:
        return copy.deepcopy(rng.choice(_ODD))
    parent, key = rng.choice(places)
    here = parent[key]
    is_url = isinstance(here, str) and here.startswith("data:")
    odd = copy.deepcopy(rng.choice(_ODD_URLS if is_url and rng.random() < 0.7 else _ODD))
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice((*rng.choice(bodies), *_ODD_KEYS))] = odd
    elif kind == 1:
        parent.extend(copy.deepcopy(parent[:1]) * rng.choice((1, 3, 300)))
    elif kind == 2:
        parent[key] = rng.choice((here, [here], {"": here}, [[[[here]]]], str(here)))
    else:
        parent[key] = odd
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list in ``value`` with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
