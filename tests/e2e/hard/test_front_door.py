"""What a public deployment expects of the front door: keys, limits, origins, uploads, patience."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.support import (
    CHAT,
    GREEDY,
    Running,
    data_url,
    further_gateway,
    official_client,
    plain_client,
    video_message,
    wait_until,
)

ALICE, BOB, CAROL, DAVE = (f"sk-{name}-0123456789" for name in ("alice", "bob", "carol", "dave"))
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the guarded gateway logs."""
    return []


@pytest.fixture(scope="module")
def guarded(
    running: Running, tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> Iterator[str]:
    """A gateway that asks for keys, and lets one origin's pages ask."""
    with plain_client(running.url) as client:
        pruning = client.post(CHAT, json=_about(running)).json()["hippo"]["pruning"]
    keys_file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys_file.write_text(
        f'[bob]\nkey = "{BOB}"\nrequests_per_minute = 2\n'
        f'[carol]\nkey = "{CAROL}"\nconcurrent_requests = 2\n'
        f"visual_tokens_per_minute = {int(1.5 * pruning['num_visual_tokens'])}\n"
    )
    with further_gateway(
        running,
        "--api-keys", f"alice={ALICE},dave={DAVE}",
        "--api-keys-file", str(keys_file),
        "--cors-origins", "https://app.example",
        "--max-upload-bytes", str(100_000),
        "--stream-keepalive-s", "0.2",
        "--log-style", "json",
        lines=lines,
    ) as door:  # fmt: skip
        yield door.url


@pytest.fixture
def http(guarded: str) -> Iterator[httpx.Client]:
    with plain_client(guarded) as client:
        yield client


@pytest.fixture
def alice(http: httpx.Client) -> httpx.Client:
    """A client that sends Alice's key, unless a request has another."""
    http.headers.update(_as(ALICE))
    return http


def _as(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _hello(**fields: Any) -> dict[str, Any]:
    return {"model": "hippo", "messages": HELLO, "max_tokens": 4, **GREEDY, **fields}


def _about(running: Running, **fields: Any) -> dict[str, Any]:
    return _hello(messages=[video_message(data_url(running.clip))], **fields)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/videos", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("given", [{}, _as("sk-mallory-0123456789"), {"authorization": "Basic x"}])
def test_nothing_of_worth_is_had_without_a_key(
    http: httpx.Client, path: str, given: dict[str, str]
) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    response = http.request(method, path, headers=given)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert "mallory" not in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/openapi.json"])
def test_what_orchestrators_ask_needs_no_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/hippo", "/nothing"])
def test_head_is_get_without_the_body(alice: httpx.Client, path: str) -> None:
    got, head = alice.get(path), alice.head(path)
    assert head.status_code == got.status_code
    assert got.content and not head.content
    for name in ("content-type", "content-length"):
        assert head.headers[name] == got.headers[name]


def test_a_head_without_end_is_refused(guarded: str, http: httpx.Client) -> None:
    address = httpx.URL(guarded)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: hippo\r\nx-long: ")
        with contextlib.suppress(ConnectionError):  # it may close before all is sent
            for _ in range(64):
                client.sendall(b"a" * (16 << 10))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(4096):  # it is closed
                answer += data
    assert b" 200 " not in answer
    assert http.get("/health").status_code == 200


def test_the_official_client_says_who_it_is(guarded: str, lines: list[str]) -> None:
    with official_client(guarded, ALICE) as client:
        answer = client.chat.completions.create(**_hello())
        assert answer.choices[0].message.content is not None
    with official_client(guarded, "sk-mallory-0123456789") as client:
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**_hello())
    wait_until(lambda: any('"key": "alice"' in line for line in lines))
    assert not any(ALICE in line or "mallory" in line for line in lines)


def test_a_key_that_asks_too_often_is_told_when_to_come_back(http: httpx.Client) -> None:
    answers = [http.post(CHAT, json=_hello(), headers=_as(BOB)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert http.post(CHAT, json=_hello(), headers=_as(ALICE)).status_code == 200


def test_each_choice_counts_as_running_but_their_video_counts_once(
    http: httpx.Client, running: Running
) -> None:
    refused = http.post(CHAT, json=_about(running, n=3), headers=_as(CAROL))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    answers = [http.post(CHAT, json=_about(running, n=2), headers=_as(CAROL)) for _ in range(3)]
    # Twice the video's tokens would be too many at once; so are those of two requests.
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "visual tokens" in answers[2].json()["error"]["message"]


def test_pages_of_one_origin_may_ask_and_others_not(http: httpx.Client) -> None:
    def preflight(origin: str) -> httpx.Response:
        asked = {"method": "POST", "headers": "authorization,content-type"}
        named = {f"access-control-request-{name}": value for name, value in asked.items()}
        return http.options(CHAT, headers={"origin": origin, **named})

    allowed = preflight("https://app.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in preflight("https://other.example").headers
    answer = http.get("/v1/models", headers={"origin": "https://app.example", **_as(ALICE)})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_an_uploaded_video_is_asked_about_twice_and_deleted(
    running: Running, alice: httpx.Client
) -> None:
    data = running.clip.read_bytes()
    upload = alice.post("/v1/videos", files={"file": ("clip.mp4", data, "video/mp4")})
    video = upload.raise_for_status().json()
    assert video["object"] == "video" and video["bytes"] == len(data)
    assert video["filename"] == "clip.mp4" and video["expires_at"] > video["created_at"]
    place = f"/v1/videos/{video['id']}"
    assert alice.get(place).json() == video

    body = _hello(messages=[video_message(video["id"])], max_tokens=16)
    answers = [alice.post(CHAT, json=body).json() for _ in range(2)]
    with plain_client(running.url) as other:
        direct = {**body, "messages": [video_message(str(running.clip))]}
        by_path = other.post(CHAT, json=direct).json()
    texts = {answer["choices"][0]["message"]["content"] for answer in (*answers, by_path)}
    assert len(texts) == 1
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    for method in ("GET", "DELETE"):
        assert alice.request(method, place, headers=_as(BOB)).status_code == 404
    assert alice.delete(place).json()["deleted"] is True
    gone = alice.post(CHAT, json=body)
    assert gone.status_code == 404
    assert gone.json()["error"]["param"] == "messages.0.content.0.video_url"


def test_a_key_learns_nothing_of_what_others_have_asked(http: httpx.Client) -> None:
    words = " ".join(f"The secret is {number}." for number in range(20))
    body = _hello(messages=[{"role": "user", "content": words}])

    def num_cached(key: str, **fields: str) -> int:
        answer = http.post(CHAT, json={**body, **fields}, headers=_as(key)).raise_for_status()
        figures = answer.json()
        cached = figures["hippo"]["num_cached_tokens"]
        assert cached["target"] == figures["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(max(cached.values()))

    assert num_cached(ALICE) < 20
    assert num_cached(ALICE) > 20
    assert num_cached(DAVE) < 20  # what the template begins with, of requests of his own
    assert num_cached(DAVE, cache_salt="alice") == 0
    assert num_cached(DAVE) > 20


def test_an_upload_that_cannot_be_kept_is_refused(alice: httpx.Client) -> None:
    for name, data, status, param in (
        ("file", b"", 400, "file"),
        ("other", b"x", 400, "file"),
        ("file", b"x" * 100_001, 507, None),
    ):
        answer = alice.post("/v1/videos", files={name: ("a.mp4", data, "video/mp4")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_text_becomes_tokens_and_text_again(alice: httpx.Client) -> None:
    given = {"model": "hippo", "prompt": "a red ball", "return_token_strs": True}
    found = alice.post("/tokenize", json=given).raise_for_status().json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 0
    assert found["max_model_len"] == 4096
    text = alice.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert text == {"prompt": "a red ball"}
    for path, body, status in (
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"messages": HELLO}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
    ):
        assert alice.post(path, json=body).status_code == status, body


def test_usage_comes_with_every_chunk_if_wanted(guarded: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with official_client(guarded, ALICE) as client:
        create: Any = client.chat.completions.create  # whose types know no further options
        fields = _hello(max_tokens=24, stream=True, stream_options=options)
        chunks = list(create(**fields, extra_body={"ignore_eos": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts) and counts[-1] == 24


def test_a_stream_is_kept_open_while_nothing_comes(running: Running, alice: httpx.Client) -> None:
    """The target is held still while it has the prompt: comments come, then the answer."""
    target = running.stack.child("target")
    target.send_signal(signal.SIGSTOP)
    try:
        with alice.stream("POST", CHAT, json=_hello(stream=True)) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            for _ in range(3):
                assert (next(lines), next(lines)) == (": keep-alive", "")
            target.send_signal(signal.SIGCONT)
            events = [line for line in lines if line.startswith("data: ")]
    finally:
        target.send_signal(signal.SIGCONT)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0][6:])["choices"][0]["delta"]["role"] == "assistant"
