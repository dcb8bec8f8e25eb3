"""What a request may say, and what becomes of it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from pydantic import ValidationError

from gateway.__main__ import main
from gateway.api import media_fields, translate
from gateway.api.speculation import speculation_plan
from gateway.common.config import GatewaySettings
from hippo.errors import InvalidRequestError
from hippo.types import MediaKind, MediaPart, OpenRequest, TextPart
from tests.support.running.gateways import chat_request
from tests.support.running.info import small_model_info

INFO = small_model_info()
SETTINGS = GatewaySettings(target=("localhost:1",))


def _open(settings: GatewaySettings = SETTINGS, /, **fields: Any) -> OpenRequest:
    request = chat_request(**fields)
    return translate.open_request(
        request,
        request_id="r",
        plan=speculation_plan(request.speculative, settings),
        info=INFO,
        settings=settings,
    )


def test_values_that_change_nothing_are_taken() -> None:
    names = "stop seed temperature stream top_k logprobs speculative mm_processor_kwargs logit_bias"
    expected = _open(seed=1, max_tokens=5)
    for fields in (
        {**dict.fromkeys([*names.split(), "unheard_of"]), "seed": 1, "max_tokens": 5},
        {"seed": 1, "max_tokens": 5, "max_completion_tokens": 5, "n": 1, "top_logprobs": 0},
        {"seed": 1, "max_tokens": 5, "mm_processor_kwargs": {"resized_width": None}},
    ):
        assert _open(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 0}, "greater than or equal to 1"),
        ({"n": True}, "valid integer"),
        ({"logprobs": 1}, "boolean"),  # of OpenAI's older completions
        ({"top_logprobs": True, "logprobs": True}, "valid integer"),
        ({"top_logprobs": -1, "logprobs": True}, "greater than or equal to 0"),
        ({"length_penalty": 1.5}, "length_penalty is 1.5, but there is no beam search; leave it"),
        ({"echo": 0}, "leave it out or give False"),
        ({"best_of": True}, "best_of is True"),
        ({"chat_template": "x" * 99}, "xxx', but prompts have the form"),
        ({"min_tokens": -1}, "greater than or equal to 0"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "differ"),
        ({"allow_special_tokens": "yes"}, "allow_special_tokens"),
        ({"return_events": True}, "return_events is only for streams"),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_named(
    fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(expected)):
        chat_request(**fields)


@pytest.mark.parametrize("said", [ChatCompletionMessage, ParsedChatCompletionMessage])
def test_an_answer_that_a_client_sends_back_is_taken(said: type[ChatCompletionMessage]) -> None:
    given: dict[str, Any] = {"role": "assistant", "content": "{}", "annotations": []}
    if said is ParsedChatCompletionMessage:
        given["parsed"] = {"a": 1}
    answer = said.model_validate(given).model_dump()
    assert None in answer.values() and [] in answer.values()
    turns = [{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "Why?"}]
    assert [turn.content for turn in _open(messages=turns).messages] == [
        (TextPart(text),) for text in ("Hi", "{}", "Why?")
    ]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"penalty": []}, ("penalty",)),
        ({"temperatur": False}, ("temperatur",)),
        ({"messages": [{"role": "user", "content": "Hi", "a": 0}]}, ("messages", 0, "a")),
    ],
)
def test_an_unknown_field_with_a_value_is_refused(
    fields: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        chat_request(**fields)
    error = caught.value.errors()[0]
    assert (error["type"], error["loc"]) == ("extra_forbidden", place)


def test_content_parts_keep_their_order_and_media_are_numbered() -> None:
    parts = [
        {"type": "text", "text": "First"},
        {"type": "video_url", "video_url": {"url": "a"}},
        {"type": "image_url", "image_url": {"url": "b", "detail": "low"}},
    ]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "video_url", "video_url": "c"}]},
    ]
    system, first, _, last = _open(messages=messages).messages
    assert system.role == "system"
    assert first.content == (TextPart("First"), MediaPart(0), MediaPart(1))
    assert last.content == (MediaPart(2),)
    sources = media_fields.media_sources(chat_request(messages=messages), INFO)
    assert [(source.kind, source.url) for source in sources] == [
        (MediaKind.VIDEO, "a"),
        (MediaKind.IMAGE, "b"),
        (MediaKind.VIDEO, "c"),
    ]
    assert sources[2].param == "messages.3.content.0.video_url"


def test_sampling_defaults_are_openais_and_the_checkpoints_own_are_not_asked() -> None:
    sampling = _open().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.repetition_penalty == 1.0
    assert _open(top_k=-1).sampling.top_k == 0
    assert _open(logit_bias={"3": -100}).sampling.logit_bias == ((3, -100.0),)


def test_the_operator_may_set_other_sampling_defaults() -> None:
    settings = dataclasses.replace(SETTINGS, default_temperature=0.1, default_top_p=0.5)
    sampling = _open(settings).sampling
    assert (sampling.temperature, sampling.top_p) == (0.1, 0.5)
    sampling = _open(settings, temperature=0, top_p=1).sampling
    assert (sampling.temperature, sampling.top_p) == (0, 1)


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    seeds = {_open().sampling.seed for _ in range(8)}
    assert len(seeds) == 8 and max(seeds) < 2**53
    assert _open(seed=5).sampling.seed == 5
    assert _open(seed=-1).sampling.seed == 2**64 - 1


def test_end_tokens_are_the_models_unless_they_are_ignored() -> None:
    assert _open().end_token_ids == (98, 99)
    assert _open(ignore_eos=True).end_token_ids == ()
    assert _open(stop_token_ids=[7, 99]).end_token_ids == (98, 99, 7)
    assert _open(ignore_eos=True, stop_token_ids=[7]).end_token_ids == (7,)


def test_fewest_tokens_are_part_of_the_sampling_and_within_the_limit() -> None:
    assert _open().sampling.min_tokens == 0
    assert _open(min_tokens=5, max_tokens=5).sampling.min_tokens == 5


def test_a_limit_that_nobody_set_is_the_servers_and_says_so() -> None:
    request = _open()
    assert (request.max_tokens, request.is_max_tokens_default) == (500, True)
    for name in ("max_tokens", "max_completion_tokens"):
        request = _open(**{name: 700})
        assert (request.max_tokens, request.is_max_tokens_default) == (700, False)
    for fields, words in (
        ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens is 6, more than max_tokens \(5\)"),
        ({"min_tokens": 600}, r"more than this server's default limit \(500\)"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, r"more than max_completion_tokens \(5\)"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            _open(**fields)


def test_names_of_control_tokens_are_text_unless_the_request_says_so() -> None:
    assert not _open().allow_special_tokens
    assert not _open(allow_special_tokens=None).allow_special_tokens
    assert _open(allow_special_tokens=True).allow_special_tokens


def test_log_probabilities_are_asked_of_the_services_only_if_wanted() -> None:
    assert _open().num_top_logprobs is None
    assert _open(logprobs=False, top_logprobs=0).num_top_logprobs is None
    assert _open(logprobs=True).num_top_logprobs == 0
    assert _open(logprobs=True, top_logprobs=20).num_top_logprobs == 20


def test_choices_differ_by_their_index_alone_and_are_limited() -> None:
    assert translate.num_choices(chat_request(), SETTINGS) == 1
    assert translate.num_choices(chat_request(n=8), SETTINGS) == 8
    with pytest.raises(InvalidRequestError, match="n is 9; this server gives at most 8 choices"):
        translate.num_choices(chat_request(n=9), SETTINGS)
    request = _open(seed=5)
    first, second = translate.choice_requests(request, 2)
    assert first == request
    assert second.sampling == dataclasses.replace(request.sampling, choice_index=1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--target=", ""),
        ("--target=nowhere", "host:port"),
        ("--draft=127.0.0.1:1,127.0.0.1:1", "each address once"),
        ("--port=70000", ""),
        ("--pruning-ratio=1", ""),
        ("--pruning-strategy=best", ""),
        ("--allowed-pruning-strategies=none,best", ""),
        ("--allowed-pruning-strategies=", ""),
        ("--allowed-pruning-strategies=uniform,none", "holistic"),
        ("--policy=magic", ""),
        ("--gamma=0", ""),
        ("--default-temperature=2.5", ""),
        ("--default-top-p=0", ""),
        ("--max-media-bytes=0", ""),
        ("--max-visual-tokens=-5", ""),
        ("--allowed-local-media-path=/no/such/folder", ""),
        ("--upload-dir=/no/such/folder", "not a directory"),
        ("--key-requests-per-minute=5", "API keys beside it"),
        ("--cors-origins=app.example", "https://app.example"),
        ("--services-tls-ca=/ca.pem", "--services-tls"),
        ("--services-tls --services-tls-ca=/no/such.pem", "/no/such.pem"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target=a:1", *flags.split()], {}) == 2
    assert words in capsys.readouterr().err


def test_a_token_id_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="whole numbers") as caught:
        _open(logit_bias={"9" * 5000: 1.0})
    assert len(caught.value.message) < 200
