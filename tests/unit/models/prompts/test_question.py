"""Which rows of a prompt count as the question about its videos."""

from typing import Any

import pytest

from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.types import ChatMessage, TextPart
from tests.support.models.reference import Reference, clip, image, prepare, user

LAST = "\n"  # the template's last token, after "assistant"


def asked(reference: Reference, prompt: Prompt) -> str:
    text: str = reference.processor.tokenizer.decode(prompt.input_ids[prompt.question_indices])
    return text


EARLIER = [*user(0, "what is it?"), ChatMessage("assistant", (TextPart("a thing"),))]
CLIP, CLIPS = [clip()], [clip(), clip(seed=1)]
CASES: dict[str, tuple[list[ChatMessage], list[DecodedMedia], str]] = {
    "after the video": (user(0, "what is in it?"), CLIP, "what is in it?"),
    "before the video": (user("what is in it?", 0), CLIP, "what is in it?" + LAST),
    "around the video": (user("look:", 0, "who is there?"), CLIP, "who is there?"),
    "after the last of two": (user(0, "one,", 1, "two: which?"), CLIPS, "two: which?"),
    "before and between two": (user("which of", 0, "and", 1), CLIPS, "which ofand" + LAST),
    "beside an image": (user(0, "like", 1, "or not?"), [clip(), image()], "likeor not?"),
    "no text at all": (user(0), CLIP, LAST),
    "the template's words": (user("a user user", 0, "user?"), CLIP, "user?"),
    "in the last turn": ([*EARLIER, *user("and where?")], CLIP, "and where?"),
    "not between videos in an earlier turn": (
        [*EARLIER, *user("and in this?", 1)],
        CLIPS,
        "and in this?" + LAST,
    ),
}


@pytest.mark.parametrize(("messages", "media", "question"), CASES.values(), ids=CASES)
def test_the_question_is_the_text_of_the_last_turn_that_has_seen_the_videos(
    model: VideoLanguageModel,
    reference: Reference,
    messages: list[ChatMessage],
    media: list[DecodedMedia],
    question: str,
) -> None:
    assert asked(reference, prepare(model, messages, *media)) == question


def test_a_prompt_without_videos_has_no_question(model: VideoLanguageModel) -> None:
    for messages, media in ((user("what?"), ()), (user(0, "what?"), (image(),))):
        assert prepare(model, messages, *media).question_indices.shape == (0,)


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("how", "question"),
    [
        ("trim", "what is in it?"),
        ("upper", "<|vision_end|>  WHAT IS IN IT? <|im_end|>\n<|im_start|>"),
    ],
)
def test_of_a_template_that_rewrites_texts_all_that_follows_the_video_counts(
    model: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch, how: str, question: str
) -> None:
    template = TEMPLATE.replace("trim", how)
    monkeypatch.setattr(model._prompts._processor, "chat_template", template)
    prompt = prepare(model, user(0, "  what is in it? "), clip())
    assert asked(reference, prompt).startswith(question)
