"""What a request may say, and what becomes of it; a service's error is in the client's words."""

import contextlib
import dataclasses
import json
import re
from typing import Annotated, Any

import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from pydantic import TypeAdapter, ValidationError

from gateway.__main__ import main
from gateway.api import media_fields, translate
from gateway.api.media_schemas import Model
from gateway.api.schemas import ChatCompletionRequest
from gateway.api.translate import in_clients_words, speculation_plan
from gateway.common.config import GatewaySettings
from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
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
        ({"n": True}, "expected a number"),
        ({"logprobs": 1}, "boolean"),  # of OpenAI's older completions
        ({"top_logprobs": True, "logprobs": True}, "expected a number"),
        ({"top_logprobs": -1, "logprobs": True}, "greater than or equal to 0"),
        ({"length_penalty": 1.5}, "length_penalty is 1.5, but there is no beam search; leave it"),
        ({"echo": 0}, "leave it out or give False"),
        ({"best_of": True}, "best_of is True"),
        ({"chat_template": "x" * 99}, "xxx', but prompts have the form"),
        ({"min_tokens": -1}, "greater than or equal to 0"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "differ"),
        ({"allow_special_tokens": "yes"}, "allow_special_tokens"),
        ({"return_events": True}, "return_events is only for streams"),
        ({"penalty": []}, "\npenalty\n  Extra inputs are not permitted"),
        ({"temperatur": False}, "\ntemperatur\n  Extra inputs are not permitted"),
        ({"messages": [{"role": "user", "content": "", "a": 0}]}, "\nmessages.0.a\n  Extra inputs"),
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


# OpenAI's; those of the checkpoint are not asked.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
PASSED_ON = {"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "repetition_penalty": 2.0}
PASSED_ON |= {"presence_penalty": 0.7, "frequency_penalty": -0.8, "min_tokens": 3}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {**DEFAULTS, "min_tokens": 0, "end_token_ids": (98, 99)}),
        ({}, {"max_tokens": 500, "is_max_tokens_default": True, "num_top_logprobs": None}),
        ({"top_k": -1}, {"top_k": 0}),
        (PASSED_ON, PASSED_ON),
        ({"logit_bias": {"3": -100}}, {"logit_bias": ((3, -100.0),)}),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 5}),
        ({"ignore_eos": True}, {"end_token_ids": ()}),
        ({"stop_token_ids": [7, 99]}, {"end_token_ids": (98, 99, 7)}),
        ({"stop_token_ids": [7], "ignore_eos": True}, {"end_token_ids": (7,)}),
        ({"max_tokens": 700}, {"max_tokens": 700, "is_max_tokens_default": False}),
        ({"max_completion_tokens": 700}, {"max_tokens": 700, "is_max_tokens_default": False}),
        ({"allow_special_tokens": None}, {"allow_special_tokens": False}),
        ({"allow_special_tokens": True}, {"allow_special_tokens": True}),
        ({"logprobs": False, "top_logprobs": 0}, {"num_top_logprobs": None}),
        ({"logprobs": True}, {"num_top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"num_top_logprobs": 20}),
    ],
)
def test_what_the_services_are_asked(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = _open(**fields)
    asked = dataclasses.asdict(request) | dataclasses.asdict(request.sampling)
    assert asked | expected == asked


def test_the_operator_may_set_other_sampling_defaults() -> None:
    settings = dataclasses.replace(SETTINGS, default_temperature=0.1, default_top_p=0.5)
    sampling = _open(settings).sampling
    assert (sampling.temperature, sampling.top_p) == (0.1, 0.5)
    sampling = _open(settings, temperature=0, top_p=1).sampling
    assert (sampling.temperature, sampling.top_p) == (0, 1)


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    seeds = {_open().sampling.seed for _ in range(8)}
    assert len(seeds) == 8 and max(seeds) < 2**53


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens is 6, more than max_tokens \(5\)"),
        ({"min_tokens": 600}, r"more than this server's default limit \(500\)"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, r"more than max_completion_tokens \(5\)"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "^.{,150}; token ids are whole numbers$"),
    ],
    ids=["max", "default", "completion", "digits"],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        _open(**fields)


def _parts_of_requests(model: type[Model] = Model) -> list[type[Model]]:
    own = model.__subclasses__()
    return own + [each for part in own for each in _parts_of_requests(part)]


@pytest.mark.parametrize("model", _parts_of_requests(), ids=lambda model: model.__name__)
@pytest.mark.parametrize("given", [True, [True], {"1": True}, 1])
def test_no_field_takes_a_truth_value_for_a_number_or_a_number_for_one(
    model: type[Model], given: Any
) -> None:
    for name, field in model.model_fields.items():
        form: Any = Annotated[field.annotation, None, *field.metadata]
        adapter = TypeAdapter[Any](form)
        with contextlib.suppress(ValidationError):
            taken = adapter.validate_python(given)
            assert json.dumps(taken).replace("1.0", "1") == json.dumps(given), name


def test_choices_are_limited() -> None:
    assert translate.num_choices(chat_request(n=8), SETTINGS) == 8
    with pytest.raises(InvalidRequestError, match="n is 9; this server gives at most 8 choices"):
        translate.num_choices(chat_request(n=9), SETTINGS)


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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_has_the_name_that_was_sent(name: str) -> None:
    error = ContextLengthError("max_tokens is 9; num_max_tokens", param="max_tokens")
    told = in_clients_words(error, chat_request(**{name: 9}))
    assert type(told) is ContextLengthError
    assert (told.message, told.param) == (f"{name} is 9; num_max_tokens", name)


def test_other_fields_are_left_as_they_are() -> None:
    for param in ("temperature", None):
        told = in_clients_words(InvalidRequestError("too hot", param=param), chat_request())
        assert (told.message, told.param) == ("too hot", param)


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("max_frames", "mm_processor_kwargs.num_frames"),
        ("max_frames", "mm_processor_kwargs.max_frames"),
        ("max_frames", "media_io_kwargs.video.num_frames"),
        ("min_frames", "mm_processor_kwargs.min_frames"),
        ("fps", "mm_processor_kwargs.fps"),
        ("fps", "media_io_kwargs.video.fps"),
        ("max_pixels", "mm_processor_kwargs.max_pixels"),
    ],
)
def test_what_says_which_frames_has_the_name_that_was_sent(param: str, name: str) -> None:
    sent: Any = 1
    for field in reversed(name.split(".")):
        sent = {field: sent}
    error = InvalidRequestError(f"{param} is 1; 2 to 768 frames", param=param)
    told = in_clients_words(error, chat_request(**sent))
    assert (told.message, told.param) == (f"{name} is 1; 2 to 768 frames", name)


def _about(num_videos: int) -> ChatCompletionRequest:
    video = {"type": "video_url", "video_url": {"url": "a"}}
    turn = {"role": "user", "content": [{"type": "text", "text": "which?"}, *[video] * num_videos]}
    return chat_request(messages=[{"role": "system", "content": "Be brief."}, turn])


@pytest.mark.parametrize(
    "message", ["the video is cut off at 30 fps", "/v/media[1].mp4 is not under a directory"]
)
def test_an_item_has_its_place_in_the_request(message: str) -> None:
    error = MediaError(message, param="media[1]")
    told = in_clients_words(error, _about(2))
    assert type(told) is MediaError
    assert (told.message, told.param) == (message, "messages.1.content.2.video_url")


def test_an_error_about_all_items_is_an_only_ones() -> None:
    error = MediaError("the model's processor refuses the media")
    assert in_clients_words(error, _about(1)).param == "messages.1.content.1.video_url"
    assert in_clients_words(error, _about(2)).param is None
