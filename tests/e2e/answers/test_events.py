"""The events of an answer, and what else the page at / is made of."""

from pathlib import Path
from typing import Any

import httpx
import openai

from hippo.page import POLICY
from tests.e2e.support import (
    CHAT,
    Running,
    ask,
    chat_body,
    chunks_of,
    data_url,
    further_gateway,
    text_of,
)


def test_events_tell_who_wrote_each_token_and_others_may_ignore_them(
    running: Running, client: openai.OpenAI, http: httpx.Client, clip: Path
) -> None:
    body = chat_body(data_url(clip), 32, stream=True, return_events=True)
    body["speculative"] = {"policy": "optimistic", "pruning": {"strategy": "holistic"}}
    with http.stream("POST", CHAT, json=body) as response:
        chunks = list(chunks_of(response))
    events = [event for chunk in chunks for event in chunk["choices"][0].get("events", ())]
    kinds = [event["type"] for event in events]
    assert {"prompt", "selection", "draft_prefill", "block", "verdict"} <= set(kinds)
    tokens = [token for event in events if event["type"] == "verdict" for token in event["tokens"]]
    assert [token["index"] for token in tokens] == list(range(32))
    assert "".join(token["text"] for token in tokens) == text_of(chunks)
    hippo_object = chunks[-1]["hippo"]
    written = [token["source"] for token in tokens]
    assert written.count("target") == 32 - hippo_object["num_accepted_tokens"]
    blocks = {event["block"]: event for event in events if event["type"] == "block"}
    for token in tokens:
        if token["source"] != "target":
            block = blocks[token["block"]]
            assert block["token_ids"][token["place"]] == token["id"]
            assert (token["place"] in block["guessed_places"]) == (token["source"] == "guess")
    (video,) = next(event for event in events if event["type"] == "prompt")["media"]
    frames, rows, columns = video["grid"]
    (selection,) = [event for event in events if event["type"] == "selection"]
    assert frames * rows * columns == selection["num_visual_tokens"] == video["num_tokens"]
    assert 0 < len(selection["kept"]) < selection["num_visual_tokens"]

    text = text_of(chunks)
    stop = text[20:24]  # the official client raises an error for an answer that is cut off
    named = ("model", "messages", "max_tokens", "temperature")
    fields = {name: body.pop(name) for name in named}
    del body["stream"]
    with client.chat.completions.stream(**fields, stop=stop, extra_body=body) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert ask(client, data_url(clip), max_tokens=2).choices[0].message.content


def test_the_page_has_a_strict_policy_and_can_be_left_out(running: Running) -> None:
    with further_gateway(running, "--page", "false") as door, door.client() as client:
        assert client.get("/").status_code == 404
        assert client.get("/v1/samples").status_code == 404
    answer = httpx.get(running.url + "/", trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert httpx.get(running.url + "/page/none.js", trust_env=False).status_code == 404


def test_samples_are_the_operators_videos_only(http: httpx.Client) -> None:
    names = [sample["name"] for sample in http.get("/v1/samples").json()["data"]]
    assert "handful.mp4" in names and "facts.json" not in names
    assert http.get("/v1/samples/handful.mp4").headers["content-type"] == "video/mp4"
    assert http.get("/v1/samples/facts.json").status_code == 404
    assert http.get("/v1/samples/..%2Ffacts.json").status_code == 404


def test_what_a_model_sees_of_a_video_is_told_before_it_is_sent(
    running: Running, http: httpx.Client
) -> None:
    clip: dict[str, Any] = {"seconds": 2, "width": 112, "height": 112}
    expected = http.get("/v1/frames", params=clip).raise_for_status().json()
    body = chat_body(data_url(running.clip), 1)
    usage = http.post(CHAT, json=body).raise_for_status().json()["usage"]
    (seen,) = usage["prompt_tokens_details"]["media"]
    assert {name: seen[name] for name in expected} == expected
    for wrong in ({"seconds": 0}, {"width": 0}, {"seconds": "x"}, {"model": "none"}):
        assert http.get("/v1/frames", params=clip | wrong).status_code in (400, 404)
