"""A thought apart from the content, wherever its markers are and whatever blocks tokens came in."""

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.answer.events import EventLog
from gateway.answer.text import AnswerText, Piece, join_pieces
from gateway.pairs.token_bytes import TokenBytes
from hippo.base.thoughts import BEGIN, END, thought_ids
from hippo.types import FinishReason, PromptInfo, TokenLogprobs, Verdict
from tests.support.models.vocabularies import LETTERS, byte_tokenizer, sentencepiece_tokenizer

TOKENIZERS = {"bytes": byte_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}
for each in TOKENIZERS.values():
    each.add_tokens([BEGIN, END])
SPECIAL_ID = 256


def markers(tokenizer: Tokenizer) -> tuple[int, int]:
    found = thought_ids(tokenizer.get_added_tokens_decoder())
    assert found is not None
    return found


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Letters of several tokens, and markers anywhere."""
    letters = [tokenizer.encode(letter).ids for letter in LETTERS]
    parts = st.sampled_from([*letters, *([each] for each in markers(tokenizer) * 3)])
    return st.lists(parts, max_size=40).map(lambda found: [one for ids in found for one in ids])


CASES = st.sampled_from(sorted(TOKENIZERS)).flatmap(
    lambda name: st.tuples(st.just(name), ids_of(TOKENIZERS[name]))
)


def split(
    ids: list[int], marks: tuple[int, int], is_thinking: bool
) -> tuple[list[int], list[int], int]:
    """What the definition says: ids of the thought and of the content, and how many tokens are the
    thought's, markers included."""
    begin, end = marks
    num_marks = int(ids[:1] == [begin])
    if not (num_marks or is_thinking):
        return [], ids, 0
    thought = list(takewhile(lambda each: each != end, ids[num_marks:]))
    num_tokens = min(num_marks + len(thought) + 1, len(ids))
    return thought, ids[num_tokens:], num_tokens


def pieces_of(
    answer: AnswerText, ids: list[int], cuts: list[int], last: FinishReason
) -> list[Piece]:
    pieces, rest, sizes = [], ids, [*cuts, len(ids)]
    while answer.finish_reason is None:
        block, rest = rest[: sizes[0]], rest[sizes[0] :]
        sizes = sizes[1:] or [len(ids)]
        logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in block)
        reason = None if rest else last
        pieces.append(
            answer.add_verdict(Verdict(0, 0, tuple(block), finish_reason=reason, logprobs=logprobs))
        )
    return pieces


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    answer = AnswerText(TokenBytes(tokenizer), stops=())
    answer.reader._begin_id = -1  # no thought
    return join_pieces(pieces_of(answer, ids, [], FinishReason.LENGTH)).text if ids else ""


@given(
    case=CASES,
    cuts=st.lists(st.integers(1, 9), max_size=20),
    is_thinking=st.booleans(),
    has_logprobs=st.booleans(),
)
def test_the_pieces_join_to_the_whole_thought_and_the_whole_content(
    case: tuple[str, list[int]], cuts: list[int], is_thinking: bool, has_logprobs: bool
) -> None:
    name, ids = case
    tokenizer = TOKENIZERS[name]
    answer = AnswerText(TokenBytes(tokenizer), stops=(), has_logprobs=has_logprobs)
    answer.reader.is_thinking = is_thinking
    whole = join_pieces(pieces_of(answer, ids, cuts, FinishReason.LENGTH)) if ids else Piece()
    thought, content, num_tokens = split(ids, markers(tokenizer), is_thinking)
    assert whole.thought == text_of(tokenizer, thought)
    assert whole.text == text_of(tokenizer, content)
    assert (answer.num_thought_tokens, answer.num_tokens) == (num_tokens, len(ids))
    if has_logprobs:  # of the content's tokens, each once
        assert [entry["logprob"] for entry in whole.logprobs] == [-float(one) for one in content]


@given(case=CASES, cuts=st.lists(st.integers(1, 9), max_size=20), stop=st.sampled_from(LETTERS))
def test_a_stop_string_is_one_of_the_content_alone(
    case: tuple[str, list[int]], cuts: list[int], stop: str
) -> None:
    name, ids = case
    tokenizer = TOKENIZERS[name]
    thought, content, num_tokens = split(ids, markers(tokenizer), True)
    answer = AnswerText(TokenBytes(tokenizer), stops=[stop])
    answer.reader.is_thinking = True
    pieces = pieces_of(answer, ids, cuts, FinishReason.LENGTH) if ids else []
    assert join_pieces(pieces).thought == text_of(tokenizer, thought)
    assert join_pieces(pieces).text == text_of(tokenizer, content).split(stop)[0]
    assert answer.num_thought_tokens == num_tokens


def test_a_model_without_both_markers_has_no_thought() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([BEGIN])
    assert thought_ids(tokenizer.get_added_tokens_decoder()) is None
    answer = AnswerText(TokenBytes(tokenizer), stops=())
    ids = tokenizer.encode(f"{BEGIN}a").ids
    (piece,) = pieces_of(answer, ids, [], FinishReason.LENGTH)
    assert piece == Piece(f"{BEGIN}a") and answer.num_thought_tokens == 0


@pytest.mark.parametrize("last", FinishReason)
def test_a_thought_may_be_all_that_there_is(last: FinishReason) -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = [*tokenizer.encode("a€").ids[:-1], *([SPECIAL_ID] * (last is FinishReason.STOP))]
    answer = AnswerText(TokenBytes(tokenizer), stops=["a"])
    answer.reader.is_thinking = True
    (piece,) = pieces_of(answer, ids, [], last)
    assert piece == Piece(thought="a\ufffd")
    assert answer.num_thought_tokens == 3 and answer.finish_reason is last


def test_events_tell_which_tokens_are_the_thoughts() -> None:
    tokenizer = TOKENIZERS["bytes"]
    begin, end = markers(tokenizer)
    log = EventLog(TokenBytes(tokenizer), 0, lambda: None)
    log.add_prompt("draft", PromptInfo(b"", 9, 0), 0)
    log.add_prompt("target", PromptInfo(b"", 9, 0, is_thinking=True), 0)
    ids = (begin, *tokenizer.encode("a").ids, end, *tokenizer.encode("b").ids, begin)
    log.add_verdict(Verdict(0, 0, ids, finish_reason=FinishReason.LENGTH), 0, num_tokens=len(ids))
    told: list[dict[str, Any]] = log.take_events()[-1]["tokens"]
    texts = [(token["text"], token.get("is_thought", False)) for token in told]
    assert texts == [("", True), ("a", True), ("", True), ("b", False), (BEGIN, False)]


def test_the_event_of_an_end_within_a_thought_is_the_thoughts() -> None:
    tokenizer = TOKENIZERS["bytes"]
    log = EventLog(TokenBytes(tokenizer), 0, lambda: None)
    log.add_prompt("target", PromptInfo(b"", 9, 0, is_thinking=True), 0)
    ids = (*tokenizer.encode("€").ids[:-1], SPECIAL_ID)
    log.add_verdict(Verdict(0, 0, ids, finish_reason=FinishReason.STOP), 0, num_tokens=len(ids))
    (*_, last) = log.take_events()[-1]["tokens"]
    assert (last["text"], last.get("is_thought")) == ("\ufffd", True)
