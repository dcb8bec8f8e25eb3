"""Finds the rows of a prompt that ask about its videos: the queries of the attention tap.

Attention is causal, so only text behind the videos attends to them:

    user   [video] [video] What happens?      the rows of "What happens?"
    user   What happens? [video]              the question's rows, and the prompt's last row

In the second order only the template's last tokens attend to the video. The question's queries are
then scored all the same, and the last row, from which the answer begins, is added.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hippo.models.interface.base import NO_INDICES, DecodedMedia
from hippo.models.prompts.layout import LaidOutText
from hippo.models.prompts.messages import render, with_texts
from hippo.types import ChatMessage, TextPart

_MARK = "\ue000"  # a private-use character, which no template contains


def question_indices(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    values: Mapping[str, Any] | None = None,
    *,
    rendered: str,
    text: LaidOutText,
    visual_indices: torch.Tensor,
) -> torch.Tensor:
    """Returns the question's indices in the prompt, ascending int64; none without visual tokens.

    The question is the text of the last user turn behind the last visual token, or, without such
    text, all text of that turn and the prompt's last token. ``rendered`` is the chat template's
    output, and ``text`` the prompt that was made of it. If the template rewrites texts, the
    question is every token behind the last visual token, including the template's own tokens.
    """
    if not visual_indices.shape[0]:
        return NO_INDICES
    length = text.input_ids.shape[0]
    asked = _last_turn(processor, messages, media, values, rendered)
    if asked is None:
        question = torch.arange(int(visual_indices[-1]) + 1, length)
    else:
        question = text.rows_of(asked)
    following = question[question > visual_indices[-1]]
    if following.shape[0]:
        return following
    return torch.cat((question, torch.tensor([length - 1])))


def _last_turn(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    values: Mapping[str, Any] | None,
    rendered: str,
) -> list[tuple[int, int]] | None:
    """Returns the characters of ``rendered`` that are the last user turn's texts; None if the texts
    cannot be located."""
    texts = [
        (part.text, index)
        for index, message in enumerate(messages)
        for part in message.content
        if isinstance(part, TextPart)
    ]
    marked = with_texts(messages, itertools.repeat(_MARK))  # shows where the template places texts
    marked = [replace(m, thought=own.thought) for m, own in zip(marked, messages, strict=True)]
    literals = render(processor, marked, media, values).split(_MARK)
    spans = _spans([text for text, _ in texts], literals, rendered)
    if spans is None:
        return None
    last_turn = max(
        (index for index, message in enumerate(messages) if message.role == "user"), default=-1
    )
    return [span for span, (_, index) in zip(spans, texts, strict=True) if index == last_turn]


def _spans(
    texts: Sequence[str], literals: Sequence[str], rendered: str
) -> list[tuple[int, int]] | None:
    """Returns the start and end of each text in ``rendered``, between the template's ``literals``;
    None if the template changed texts in another way than by stripping them."""
    if len(literals) != len(texts) + 1:
        return None
    for candidates in (texts, [text.strip() for text in texts]):
        pieces = itertools.chain(*zip(literals, [*candidates, ""], strict=True))
        if "".join(pieces) != rendered:
            continue
        spans, cursor = [], 0
        for literal, text in zip(literals, candidates, strict=False):
            cursor += len(literal)
            spans.append((cursor, cursor + len(text)))
            cursor += len(text)
        return spans
    return None
