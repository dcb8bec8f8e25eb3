"""Which rows of a prompt ask about its videos: the queries of the early-layer tap.

Attention is causal, so the text that follows the videos has seen them:

    user   [video] [video] What happens?      the rows of "What happens?"
    user   What happens? [video]              the question's rows, and the prompt's last one

In the second order only the template's last tokens see the video. The question is then scored as
if it did, and the last row, from which the answer begins, is added.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hippo.models.base import DecodedMedia
from hippo.models.messages import render
from hippo.types import ChatMessage, TextPart

NO_QUESTION = torch.empty(0, dtype=torch.int64)

_MARK = "\ue000"  # of the private use area: no template contains it


def question_indices(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    *,
    rendered: str,
    input_ids: torch.Tensor,
    visual_indices: torch.Tensor,
) -> torch.Tensor:
    """Places of the question in ``input_ids``: int64, ascending; empty without visual tokens.

    The text of the last user turn that follows the last visual token; if none does, all text of
    that turn and the prompt's last token. ``rendered`` is what the chat template made of the
    messages. Of a template that rewrites texts, all that follows the last visual token counts,
    the template's own tokens included.
    """
    if not visual_indices.shape[0]:
        return NO_QUESTION
    question = _last_turn(processor, messages, media, rendered, input_ids)
    if question is None:
        question = torch.arange(int(visual_indices[-1]) + 1, input_ids.shape[0])
    following = question[question > visual_indices[-1]]
    if following.shape[0]:
        return following
    return torch.cat((question, torch.tensor([input_ids.shape[0] - 1])))


def _last_turn(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    rendered: str,
    input_ids: torch.Tensor,
) -> torch.Tensor | None:
    """Places of the last user turn's text; None when it cannot be told from the template's."""
    texts = [
        (part.text, index)
        for index, message in enumerate(messages)
        for part in message.content
        if isinstance(part, TextPart)
    ]
    literals = render(processor, _marked(messages), media).split(_MARK)
    spans = _spans([text for text, _ in texts], literals, rendered)
    if spans is None:
        return None
    last_turn = max(
        (index for index, message in enumerate(messages) if message.role == "user"), default=-1
    )
    asked = [span for span, (_, index) in zip(spans, texts, strict=True) if index == last_turn]
    encoding = processor.tokenizer(rendered, return_offsets_mapping=True)
    placeholder_ids = (processor.image_token_id, processor.video_token_id)
    is_asked = [
        any(start < last and end > first for first, last in asked)
        for token_id, (start, end) in zip(
            encoding["input_ids"], encoding["offset_mapping"], strict=True
        )
        if token_id not in placeholder_ids
    ]
    # The processor multiplies placeholders before it tokenizes; the text between stays as it is.
    places = (~torch.isin(input_ids, torch.tensor(placeholder_ids))).nonzero()[:, 0]
    if places.shape[0] != len(is_asked):
        return None
    return places[torch.tensor(is_asked, dtype=torch.bool)]


def _marked(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with a mark for every text: rendered, they show where the template puts it."""
    return [
        dataclasses.replace(
            message,
            content=tuple(
                TextPart(_MARK) if isinstance(part, TextPart) else part for part in message.content
            ),
        )
        for message in messages
    ]


def _spans(
    texts: Sequence[str], literals: Sequence[str], rendered: str
) -> list[tuple[int, int]] | None:
    """Where each text stands in ``rendered``, between the template's ``literals``; None if it is
    not there. Templates may strip texts, but nothing else."""
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
