"""Finds the rows of a prompt that ask about its videos: the queries of the attention tap.

Attention is causal, so only text behind the videos attends to them:

    user   [video] [video] What happens?      the rows of "What happens?"
    user   What happens? [video]              the question's rows, and the prompt's last row

In the second order only the template's last tokens attend to the video. The question's queries are
then scored all the same, and the last row, from which the answer begins, is added.
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

_MARK = "\ue000"  # a private-use character, which no template contains


def question_indices(
    processor: Any,
    messages: Sequence[ChatMessage],
    media: Sequence[DecodedMedia],
    *,
    rendered: str,
    input_ids: torch.Tensor,
    visual_indices: torch.Tensor,
) -> torch.Tensor:
    """Returns the question's indices in ``input_ids``, ascending int64; none without visual tokens.

    The question is the text of the last user turn behind the last visual token, or, without such
    text, all text of that turn and the prompt's last token. ``rendered`` is the chat template's
    output. If the template rewrites texts, the question is every token behind the last visual
    token, including the template's own tokens.
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
    """Returns the indices of the last user turn's text; None if the text cannot be located."""
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
    # The processor repeats placeholders before it tokenizes, and does not change the other text.
    places = (~torch.isin(input_ids, torch.tensor(placeholder_ids))).nonzero()[:, 0]
    if places.shape[0] != len(is_asked):
        return None
    return places[torch.tensor(is_asked, dtype=torch.bool)]


def _marked(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Replaces every text by a mark, which shows where the template places texts."""
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
