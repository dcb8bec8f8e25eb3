"""The tokenizer: exact round trips, and the batches' encoder equals the chat template."""

from __future__ import annotations

import itertools

import numpy as np
from transformers import PreTrainedTokenizerBase

from demo.figures import content_pieces
from demo.training.batches import Encoder
from demo.world import scenes as world
from demo.world import texts
from demo.world.texts import Exchange


def description() -> str:
    """A long description."""
    rng = np.random.default_rng(5)
    scene = world.sample_scene(rng, height=168, width=168, duration_s=4.0, min_objects=5)
    return texts.detailed(scene)


def test_text_comes_back_unchanged(trained: PreTrainedTokenizerBase) -> None:
    for text in (description(), "Wörter, 漢字 und 12,5 %\n\n  two  spaces", "<|im_start|>user\n"):
        assert trained.decode(trained(text).input_ids) == text


def test_a_conversation_is_encoded_as_by_the_chat_template(
    trained: PreTrainedTokenizerBase, encoder: Encoder
) -> None:
    exchanges = [Exchange("", "List the objects.", "Top left."), Exchange("", "Hi", "Hello!")]
    for is_video_first in (True, False):
        parts = [{"type": "video"}, {"type": "text", "text": exchanges[0].question}]
        messages = [
            {"role": "system", "content": "Be precise."},
            {"role": "user", "content": parts if is_video_first else parts[::-1]},
            {"role": "assistant", "content": exchanges[0].answer},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello!"},
        ]
        text = str(trained.apply_chat_template(messages, tokenize=False))
        ids, said = encoder.conversation(
            exchanges, grid=(1, 1, 1), is_video_first=is_video_first, system="Be precise."
        )
        assert trained.decode(ids) == text
        assert trained(text).input_ids == ids
        spoken = [token for token, is_said in zip(ids, said, strict=True) if is_said]
        assert trained.decode(spoken) == "Top left.<|im_end|>Hello!<|im_end|>"


def test_content_tokens_spell_the_content_words(trained: PreTrainedTokenizerBase) -> None:
    text = description()
    ids = trained(text).input_ids
    pieces = [str(trained.decode([token])) for token in ids]
    kept = "".join(itertools.compress(pieces, content_pieces(pieces)))
    words = [text[start:end] for start, end in texts.content_spans(text)]
    assert kept.split() == words
