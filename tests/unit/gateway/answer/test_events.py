"""The events of a stream: who wrote each token, and where it stood in its block."""

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.answer.event_schemas import StreamEvent
from gateway.answer.events import EventLog
from gateway.answer.text import AnswerText
from gateway.pairs.token_bytes import TokenBytes
from hippo.types import (
    Block,
    Branch,
    FinishReason,
    MediaKind,
    MediaUse,
    PromptInfo,
    Pruning,
    Selection,
    Timing,
    Verdict,
)
from tests.unit.gateway.answer.test_text import (
    CASES,
    SIZES,
    TOKENIZER,
    TOKENS,
    VOCABULARIES,
    verdicts_of,
)

MS = 1_000_000


class Log(EventLog):
    """A log, and how often it told that there is something new."""

    def __init__(self) -> None:
        self.told: list[None] = []
        super().__init__(TOKENS, 100 * MS, lambda: self.told.append(None))

    def take(self) -> list[dict[str, Any]]:
        """The events so far, each as described."""
        taken = list(self.take_events())
        for event in taken:
            described = TypeAdapter(StreamEvent).validate_python(event, strict=True)
            assert described.model_dump(exclude_unset=True) == event
        return taken

    def verdict(self, epoch: int, start: int, ids: Sequence[int], **fields: Any) -> None:
        """A verdict whose tokens are all the answer's, unless ``num_tokens`` says otherwise."""
        num_tokens = fields.pop("num_tokens", start + len(ids))
        verdict = Verdict(epoch, start, tuple(ids), **fields)
        self.add_verdict(verdict, 105 * MS, num_tokens=num_tokens)

    def block(self, epoch: int, start: int, ids: Sequence[int], **fields: Any) -> None:
        self.add_block(Block(epoch, start, tuple(ids), **fields), 102 * MS)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def _sources(verdict: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(each["source"], each.get("block"), each.get("place")) for each in verdict["tokens"]]


def test_a_token_has_its_writer_its_block_and_its_place() -> None:
    log, ids = Log(), _ids("abcab")
    log.verdict(0, 0, ids[:1], timing=Timing(vision_ns=MS))
    log.block(0, 1, ids[1:2])
    log.block(0, 2, ids[2:4], guessed_places=(1,))
    log.verdict(0, 1, ids[1:], num_draft_tokens=3, num_accepted_tokens=3)

    first, one, other, last = log.take()
    assert first["mode"] == "prefill" and first["vision"] == 1.0 and first["at"] == 5.0
    assert (one["block"], other["block"], one["at"]) == (0, 1, 2.0)
    own = ("target", None, None)
    assert _sources(first) == [own]
    assert _sources(last) == [("draft", 0, 0), ("draft", 1, 0), ("guess", 1, 1), own]
    assert last["mode"] == "optimistic" and last["forward_number"] == 1
    assert "".join(each["text"] for each in (*first["tokens"], *last["tokens"])) == "abcab"
    assert len(log.told) == 4 and log.take() == []


def test_a_block_after_a_rejection_does_not_hide_the_one_that_was_verified() -> None:
    log, ids = Log(), _ids("abc")
    log.verdict(0, 0, ids[:1])
    log.verdict(1, 1, ids[1:2], num_draft_tokens=1, is_rejection=True)
    log.block(1, 2, ids[2:])
    log.block(0, 2, ids[2:], guessed_places=(0,))  # of the rejected run
    log.verdict(1, 2, ids[2:], num_draft_tokens=1, num_accepted_tokens=1, is_conservative=True)
    *_, fresh, stale, verdict = log.take()
    assert (fresh["is_stale"], stale["is_stale"]) == (False, True)
    assert _sources(verdict) == [("draft", 0, 0)]
    assert verdict["mode"] == "conservative"


def test_a_token_of_a_branch_has_its_block_and_a_place_behind_the_blocks_own() -> None:
    log, ids = Log(), _ids("abc")
    branch = Branch(0, (ids[0], ids[1]))
    log.block(0, 0, (ids[2], ids[2]), branches=(branch,))
    log.verdict(1, 0, ids[:1], is_rejection=True)
    log.verdict(1, 1, ids[1:], num_draft_tokens=1, num_accepted_tokens=1)
    block, _, verdict_event = log.take()
    assert block["branches"] == [list(branch.token_ids)]
    assert _sources(verdict_event) == [("draft", 0, 2), ("target", None, None)]


def test_a_token_that_an_earlier_run_proposed_is_its_last_proposals() -> None:
    log, ids = Log(), _ids("abc")
    log.block(0, 0, ids[2:], guessed_places=(0,))
    log.verdict(1, 0, ids[:1], num_draft_tokens=1, is_rejection=True)
    log.block(1, 1, ids[:1], branches=(Branch(0, (ids[0], ids[2])),))
    log.verdict(1, 1, ids[2:], num_draft_tokens=1, num_accepted_tokens=1)
    *_, verdict = log.take()
    assert _sources(verdict) == [("draft", 1, 1)]


def test_tokens_behind_a_stop_string_are_left_out() -> None:
    log, ids = Log(), _ids("abc")
    log.verdict(0, 0, ids[:1])
    log.verdict(0, 1, ids[1:], num_tokens=2)
    log.verdict(0, 3, ids[:1], num_tokens=2)
    _, second, third = log.take()
    assert [each["text"] for each in second["tokens"]] == ["b"] and third["tokens"] == []
    assert second["mode"] == "target_only"


@given(case=CASES, sizes=SIZES, last=st.sampled_from(FinishReason))
@example(("bytes", TOKENIZER.encode("ab").ids), [2], FinishReason.STOP)  # an end token is a word
@example(("bytes", TOKENIZER.encode("€").ids[:2]), [2], FinishReason.LENGTH)  # no character
def test_the_tokens_texts_join_to_the_answer(
    case: tuple[str, list[int]], sizes: list[int], last: FinishReason
) -> None:
    name, ids = case
    tokens = TokenBytes(VOCABULARIES[name])
    events, answer = EventLog(tokens, 0, lambda: None), AnswerText(tokens, stops=())
    text, start = "", 0
    for block in verdicts_of(ids, sizes):
        reason = last if start + len(block) == len(ids) else None
        verdict = Verdict(0, start, tuple(block), finish_reason=reason)
        start += len(block)
        text += answer.add_verdict(verdict).text
        events.add_verdict(verdict, 0, num_tokens=start)
    told = [token for event in events.take_events() for token in event["tokens"]]
    assert [token["id"] for token in told] == ids
    assert "".join(token["text"] for token in told) == text


def test_what_is_before_the_first_token_is_told() -> None:
    log = Log()
    video = MediaUse(
        MediaKind.VIDEO, 4, 84, 56, 12, visual_grid=(2, 2, 3), frame_seconds=(0.0, 0.5, 1.0, 1.5)
    )
    log.add_prompt("target", PromptInfo(b"", 20, 12, 0, 3 * MS, (video,)), 104 * MS)
    log.add_selection(Selection((0, 5), 12, MS), Pruning(), 106 * MS)
    log.add_draft_prefill(Timing(forward_ns=2 * MS, vision_ns=MS), 109 * MS)
    log.add_draft_loss("it is gone", 110 * MS)
    prompt, selection, prefill, loss = log.take()
    assert (prompt["at"], prompt["preprocess"]) == (4.0, 3.0)
    assert prompt["media"][0]["grid"] == [2, 2, 3]
    assert prompt["media"][0]["frame_seconds"] == [0.0, 0.5, 1.0, 1.5]
    assert (selection["kept"], selection["num_visual_tokens"]) == ([0, 5], 12)
    assert (prefill["forward"], prefill["vision"]) == (2.0, 1.0)
    assert loss["problem"] == "it is gone"
