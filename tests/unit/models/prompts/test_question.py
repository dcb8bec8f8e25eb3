"""Which rows of a prompt count as the question about its videos."""

from __future__ import annotations

from typing import Any

import pytest

from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.types import ChatMessage, MediaPart, TextPart
from tests.support.models.reference import Reference, clip, image, prepare, user

LAST = "\n"  # the template's last token, after "assistant"


@pytest.fixture(scope="module")
def processor(reference: Reference) -> Any:
    return reference.processor


def asked(processor: Any, prompt: Prompt) -> str:
    text: str = processor.tokenizer.decode(prompt.input_ids[prompt.question_indices])
    return text


@pytest.mark.parametrize(
    ("parts", "media", "question"),
    [
        ((0, "what is in it?"), [clip()], "what is in it?"),
        (("what is in it?", 0), [clip()], "what is in it?" + LAST),
        (("look:", 0, "who is there?"), [clip()], "who is there?"),
        ((0, "one,", 1, "two: which?"), [clip(), clip(seed=1)], "two: which?"),
        (("which of", 0, "and", 1), [clip(), clip(seed=1)], "which ofand" + LAST),
        ((0, "is it like", 1, "or not?"), [clip(), image()], "is it likeor not?"),
        ((0,), [clip()], LAST),
        (("a user user", 0, "user?"), [clip()], "user?"),
    ],
    ids=[
        "after the video",
        "before the video",
        "around the video",
        "after the last of two videos",
        "before and between videos",
        "images do not count",
        "no text at all",
        "the template's words",
    ],
)
def test_the_question_is_the_text_that_has_seen_the_videos(
    model: VideoLanguageModel,
    processor: Any,
    parts: tuple[str | int, ...],
    media: list[DecodedMedia],
    question: str,
) -> None:
    assert asked(processor, prepare(model, user(*parts), *media)) == question


def test_only_the_last_user_turn_asks(model: VideoLanguageModel, processor: Any) -> None:
    messages = [
        ChatMessage("system", (TextPart("you see things"),)),
        ChatMessage("user", (MediaPart(0), TextPart("what is it?"))),
        ChatMessage("assistant", (TextPart("a thing"),)),
        ChatMessage("user", (TextPart("and where?"),)),
    ]
    assert asked(processor, prepare(model, messages, clip())) == "and where?"


def test_text_of_an_earlier_turn_between_videos_is_no_question(
    model: VideoLanguageModel, processor: Any
) -> None:
    messages = [
        ChatMessage("user", (MediaPart(0), TextPart("what is it?"))),
        ChatMessage("assistant", (TextPart("a thing"),)),
        ChatMessage("user", (TextPart("and in this?"), MediaPart(1))),
    ]
    prompt = prepare(model, messages, clip(), clip(seed=1))
    assert asked(processor, prompt) == "and in this?" + LAST


def test_a_prompt_without_videos_has_no_question(model: VideoLanguageModel) -> None:
    for messages, media in ((user("what?"), ()), (user(0, "what?"), (image(),))):
        assert prepare(model, messages, *media).question_indices.shape == (0,)


def template(body: str) -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% for part in message['content'] %}{% if part['type'] == 'video' %}"
        "<|vision_start|><|video_pad|><|vision_end|>{% else %}" + body + "{% endif %}{% endfor %}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("body", "question"),
    [
        ("{{ part['text'] | trim }}", "what is in it?"),
        ("{{ part['text'] | upper }}", "<|vision_end|>  WHAT IS IN IT? <|im_end|>\n<|im_start|>"),
    ],
    ids=["strips", "rewrites"],
)
def test_of_a_template_that_rewrites_texts_all_that_follows_the_video_counts(
    model: VideoLanguageModel,
    processor: Any,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    question: str,
) -> None:
    own: Any = model
    monkeypatch.setattr(own._prompts._processor, "chat_template", template(body))
    prompt = prepare(model, user(0, "  what is in it? "), clip())
    assert asked(processor, prompt).startswith(question)
