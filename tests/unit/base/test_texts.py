"""Texts are bounded before they are tokenized whole."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hippo.base import texts
from hippo.base.texts import TextLimit, _pieces
from hippo.errors import ContextLengthError


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def limit() -> TextLimit:
    tokenizer = Tokenizer(WordLevel({"a": 0, "longer": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken("<|e|>", special=True)])
    return TextLimit(tokenizer, 100)


@given(st.text(st.sampled_from("ab \u00e9"), max_size=200), st.integers(1, 20))
def test_pieces_are_short_and_the_whole_text(text: str, length: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_PIECE_LENGTH", length)
        cut = list(_pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= length for piece in cut)


async def test_words_of_all_texts_count(limit: TextLimit, threads: ThreadPoolExecutor) -> None:
    assert await limit.count_tokens(["a a", "a " * 98], threads) == 100
    with pytest.raises(ContextLengthError, match="more than 100 tokens") as caught:
        await limit.count_tokens(["a a", "a " * 99], threads, param="prompt")
    assert caught.value.param == "prompt"


async def test_the_name_of_a_control_token_is_text_of_up_to_as_many_tokens_as_it_has_bytes(
    limit: TextLimit, threads: ThreadPoolExecutor
) -> None:
    assert await limit.count_tokens(["a <|e|> a", "<|e|>" * 90], threads) == 2 + 91 * 5


async def test_a_text_that_no_context_holds_is_not_looked_at(
    limit: TextLimit, threads: ThreadPoolExecutor
) -> None:
    assert limit.max_length == 100 * len("longer")
    threads.shutdown()
    with pytest.raises(ContextLengthError, match=r"601 characters; .* holds 600"):
        await limit.count_tokens([" " * 600, "a"], threads)


async def test_counting_stops_at_the_first_token_beyond_and_with_the_caller(
    limit: TextLimit, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_PIECE_LENGTH", 20)
    counted = []

    def encode(piece: str) -> list[int]:
        counted.append(piece)
        return [0] * 60

    monkeypatch.setattr(limit, "_encode", encode)
    with pytest.raises(ContextLengthError):
        await limit.count_tokens(["a " * 300], threads)
    assert len(counted) == 2
    task = asyncio.create_task(limit.count_tokens(["a " * 300], threads))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(counted) <= 3
