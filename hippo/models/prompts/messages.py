"""Checks and renders chat messages; the prompt builders of all families use these functions."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from hippo.errors import ContextLengthError, InvalidRequestError
from hippo.models.interface.base import DecodedMedia
from hippo.models.prompts.layout import MediaMark
from hippo.types import ChatMessage, TextPart


def media_in_order(
    messages: Sequence[ChatMessage], media: Sequence[DecodedMedia]
) -> list[DecodedMedia]:
    """Returns the media in the order in which the messages refer to them.

    Raises InvalidRequestError if there are no messages, for an index without an item, and for an
    item that no message refers to.
    """
    if not messages:
        raise InvalidRequestError("there must be at least one message", param="messages")
    indices = [
        part.media_index
        for message in messages
        for part in message.content
        if not isinstance(part, TextPart)
    ]
    for index in indices:
        if not 0 <= index < len(media):
            raise InvalidRequestError(
                f"a message refers to media item {index}, but there are {len(media)}",
                param="messages",
            )
    if unused := sorted(set(range(len(media))) - set(indices)):
        raise InvalidRequestError(f"no message refers to media item {unused[0]}", param="messages")
    return [media[index] for index in indices]


# What transformers gives a template, beside the names of special tokens and jinja's own.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}
_GENERATION_TAG = re.compile(
    r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}"
)  # only transformers knows it


def template_names(processor: Any) -> tuple[str, ...]:
    """Returns the names of what a request may give the chat template, sorted."""
    template = processor.chat_template or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names = find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
    names -= _GIVEN | environment.globals.keys() | {"strftime_now"}
    return tuple(sorted(name for name in names if not name.endswith("_token")))


def render(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    values: Mapping[str, Any] | None = None,
) -> str:
    """Applies the chat template, with the generation prompt at the end; ``values`` are what the
    request gives it, by names that it knows.

    Raises InvalidRequestError for messages and values that the template refuses.
    """
    conversation = [
        {
            **({"reasoning_content": message.thought} if message.thought else {}),
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": media[part.media_index].kind.value}
                for part in message.content
            ],
        }
        for message in messages
    ]
    try:
        text: str = processor.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **(values or {})
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        refused, param = "messages", "messages"
        if values:
            refused, param = "messages or chat_template_kwargs", "chat_template_kwargs"
        raise InvalidRequestError(
            f"the model's chat template refuses these {refused}: {error}", param=param
        ) from error
    return text


def texts_of(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """Yields the texts of all messages, in order, thoughts before contents."""
    for message in messages:
        if message.thought:
            yield message.thought
        for part in message.content:
            if isinstance(part, TextPart):
                yield part.text


def with_texts(messages: Sequence[ChatMessage], texts: Iterable[str]) -> list[ChatMessage]:
    """Returns the messages with other texts: the next of ``texts`` for each of texts_of."""
    others = iter(texts)
    return [
        dataclasses.replace(
            message,
            thought=next(others) if message.thought else "",
            content=tuple(
                TextPart(next(others)) if isinstance(part, TextPart) else part
                for part in message.content
            ),
        )
        for message in messages
    ]


def refuse_placeholders(messages: Sequence[ChatMessage], marks: Iterable[MediaMark]) -> None:
    """Raises InvalidRequestError if a text contains what stands for media in a prompt."""
    marks = list(marks)
    reserved = sorted({each.token for each in marks} | {each.placeholder for each in marks})
    if any(token in text for text in texts_of(messages) for token in reserved):
        raise InvalidRequestError(
            f"text may not contain {' or '.join(reserved)}; pass media as parts", param="messages"
        )


# The two ways out for a client and an operator; the names are a request's fields.
REMEDY = (
    "ask for fewer frames (num_frames, max_frames or a lower fps) or smaller ones (max_pixels), "
    "shorten the text, or start the services with a larger --max-context-length"
)


def check_length(length: int, max_context_length: int) -> None:
    """Raises ContextLengthError if a prompt of ``length`` leaves no room for a completion."""
    if length >= max_context_length:
        raise ContextLengthError(
            f"the prompt is {length} tokens long; this model is served with a context of "
            f"{max_context_length}, the completion included: {REMEDY}",
            param="messages",
        )


def prompt_hash(input_ids: torch.Tensor) -> bytes:
    """Returns the SHA-256 of the ids (int64 ``[length]``) as little-endian uint32."""
    return hashlib.sha256(input_ids.numpy().astype("<u4").tobytes()).digest()
