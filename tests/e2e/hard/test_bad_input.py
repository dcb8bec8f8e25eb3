"""Bad input, each with its status, its field and a message that says what is wrong."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.support import CHAT, Running, data_url, video_message, wait_until

HELLO = [{"role": "user", "content": "Hello"}]


def _refused(response: httpx.Response, status: int, *, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape, its status and field checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return str(error["message"])


def _ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"model": "hippo", "messages": HELLO, "max_tokens": 2, **fields})


def _ask_about(http: httpx.Client, url: str, **fields: Any) -> httpx.Response:
    return _ask(http, messages=[video_message(url)], **fields)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(running: Running) -> Iterator[None]:
    """After every refusal all processes run and all slots become free."""
    yield
    running.stack.check_running()
    wait_until(lambda: running.slots_used() == 0)


VIDEO = "messages.0.content.0.video_url"
REFUSED: dict[str, tuple[str, int, str]] = {
    "an empty file": (data_url(b""), 400, "the video is empty (0 bytes)"),
    "a text": (data_url(b"This is plain text. " * 50), 400, "not a video that can be read"),
    "too many bytes": (data_url(bytes((1 << 20) + 1)), 400, "1048576 bytes"),
    "broken base64": ("data:video/mp4;base64,@@@", 400, "not valid base64"),
    "an image": ("data:image/png;base64,AAAA", 400, "not a video"),
    "another protocol": ("ftp://127.0.0.1/clip.mp4", 400, "no http(s) URL"),
    "a path elsewhere": ("/etc/passwd", 403, "not under an allowed directory"),
    "an URL elsewhere": ("https://elsewhere.example/clip.mp4", 403, "not on this server's list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_video_that_cannot_be_had(http: httpx.Client, name: str) -> None:
    url, status, expected = REFUSED[name]
    for stream in (False, True):
        assert expected in _refused(_ask_about(http, url, stream=stream), status, param=VIDEO)


def test_an_unknown_model(http: httpx.Client) -> None:
    message = _refused(_ask(http, model="gpt-4o"), 404, param="model")
    assert message == "there is no model 'gpt-4o' here; 'hippo' is served"
    assert http.get("/v1/models/gpt-4o").status_code == 404


def test_a_prompt_that_is_too_long(http: httpx.Client, running: Running) -> None:
    long = [{"role": "user", "content": "x " * running.max_context_length}]
    response = _ask(http, messages=long)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert str(running.max_context_length) in _refused(response, 400, param="messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 1e9}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**8]}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"beam_width": 4}, "beam_width"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0"),
        ({"speculative": {"policy": "magic"}}, "speculative.policy"),
        ({"speculative": {"gamma": 1000}}, "speculative.gamma"),
        ({"speculative": {"pruning": {"ratio": 1.0}}}, "speculative.pruning.ratio"),
        ({"speculative": {"pruning": {"strategy": "best"}}}, "speculative.pruning.strategy"),
        ({"mm_processor_kwargs": {"fps": -1}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"zoom": 2}}, "mm_processor_kwargs.zoom"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_field_out_of_range_or_unknown_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    message = _refused(_ask(http, **fields), 400, param=param)
    assert param.split(".")[-1] in message or param.startswith("messages")


CUT = "a red \ud83d"  # a client has cut an emoji between its two UTF-16 units


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": CUT}]}, "messages.0.content.0.text"),
        (CHAT, {"messages": HELLO, "model": CUT}, "model"),
        (CHAT, {"messages": HELLO, "stop": ["x", CUT]}, "stop.1"),
        (CHAT, {"messages": HELLO, "guided_json": CUT}, "guided_json.constrained-str"),
        (CHAT, {"messages": HELLO, CUT: 1}, None),
        ("/tokenize", {"prompt": CUT}, "prompt"),
        ("/detokenize", {"tokens": [1], "model": CUT}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_half_of_an_emoji_is_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    # Escapes of JSON can name half of a surrogate pair, unlike UTF-8.
    body = json.dumps({"model": "hippo", **fields})
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    message = _refused(response, 400, param=param)
    assert message.startswith(f"{param or 'the name of a field'} has half of a surrogate pair")


LONG = b'{"padding": "' + b" " * (5 << 20) + b'"}'


@pytest.mark.parametrize(
    ("content", "headers", "expected"),
    [
        (b"", {}, "JSON"),
        (b"{", {}, "not JSON"),
        (b"[1, 2]", {}, "JSON object"),
        (b'"text"', {}, "JSON object"),
        (b'{"model": "hippo"}', {}, "messages is required"),
        (b"\xff\xfe", {}, "JSON"),
        (b'{"model": "hippo", "messages": NaN}', {}, "messages"),
        (b"hello", {"content-type": "text/plain"}, "application/json"),
        (gzip.compress(b"{}", mtime=0), {"content-encoding": "gzip"}, "compressed (gzip)"),
        (LONG, {}, "4194304"),
        (LONG, {"transfer-encoding": "chunked"}, "4194304"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_a_body_that_is_not_a_request(
    http: httpx.Client, content: bytes, headers: dict[str, str], expected: str
) -> None:
    pieces = (content[start : start + (1 << 16)] for start in range(0, len(content), 1 << 16))
    response = http.post(
        CHAT,
        content=pieces if "transfer-encoding" in headers else content,
        headers={"content-type": "application/json", **headers},
    )
    assert response.status_code == (413 if content is LONG else 400), response.text
    assert expected in response.json()["error"]["message"]


def test_too_many_of_something_are_counted(http: httpx.Client) -> None:
    for fields, words in (
        ({"messages": HELLO * 1025}, "messages has 1,025 messages; at most 1,024 are allowed"),
        ({"messages": []}, "messages has 0 messages; at least 1 must be there"),
        ({"stop": ["a"] * 17}, "stop has 17 stop strings; at most 16 are allowed"),
        ({"cache_salt": "x" * 300}, "cache_salt has 300 characters; at most 256 are allowed"),
    ):
        assert words in _refused(_ask(http, **fields), 400, param=next(iter(fields)))


def test_an_unknown_path_and_a_wrong_method(http: httpx.Client) -> None:
    assert "/v1/nothing" in _refused(http.get("/v1/nothing"), 404)
    assert "POST" in _refused(http.get(CHAT), 405)
