"""Masks of a grammar follow the ids that they are given, whatever was verified and rejected."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import grammar_from

from hippo.engine.grammars import GrammarCompiler
from hippo.errors import HippoError, InvalidRequestError
from hippo.grammars.limits import new_matcher
from hippo.sampling.masks import TokenMasks, mask_logits
from hippo.types import SamplingParams
from tests.support.models.letters import letter_tokenizer
from tests.support.running.info import small_model_info
from tests.support.running.services import toy_request

LETTERS = [*'abcx{}[]":, 0123456789', "ab", "abc", '":', '{"', "12"]
END, OTHER_END = len(LETTERS), len(LETTERS) + 1
NUM_IDS = len(LETTERS) + 3  # the last one is special and ends nothing
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = grammar_from("json", json.dumps(SCHEMA))


INFO = replace(
    small_model_info(),
    tokenizer_json=letter_tokenizer(LETTERS, ("<end>", "<stop>", "<pad>")),
    num_token_ids=NUM_IDS,
    end_token_ids=(END, OTHER_END),
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(INFO)
    yield compiler
    compiler.close()


def _compile(
    compiler: GrammarCompiler,
    grammar: str,
    *,
    end_token_ids: tuple[int, ...] = (END, OTHER_END),
    min_tokens: int = 0,
) -> TokenMasks:
    sampling = SamplingParams(grammar=grammar, min_tokens=min_tokens)
    request = toy_request(sampling=sampling, end_token_ids=end_token_ids)
    return asyncio.run(compiler.compile_request(request))


def _regex(compiler: GrammarCompiler, regex: str, **options: int) -> TokenMasks:
    return _compile(compiler, grammar_from("regex", regex), **options)  # type: ignore[arg-type]


def _allowed(masks: TokenMasks, output: Sequence[int], draft: Sequence[int] = ()) -> list[set[int]]:
    """The allowed ids of each row."""
    masks.start(output, draft)
    rows = mask_logits(torch.zeros(len(draft) + 1, NUM_IDS), masks.take())
    masks.check(draft, draft)
    return [set(torch.nonzero(row == 0).flatten().tolist()) for row in rows]


def _ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def _texts(ids: set[int]) -> set[str]:
    return {LETTERS[i] for i in ids if i < END}


REGEXES = st.recursive(
    st.sampled_from(["a", "b", "c", "ab", "x?", "[a-c]", "1+"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        inner.map(lambda each: f"({each}){{0,3}}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    grammar=st.one_of(REGEXES.map(lambda regex: grammar_from("regex", regex)), st.just(JSON)),
    data=st.data(),
)
def test_a_blocks_masks_equal_those_of_its_rows_after_any_rejections(
    compiler: GrammarCompiler, grammar: str, data: st.DataObject
) -> None:
    matcher = new_matcher(compiler._tokenizer, grammar)

    def anew() -> TokenMasks:
        return TokenMasks(
            matcher.deep_copy,
            num_token_ids=NUM_IDS,
            end_token_ids=(END, OTHER_END),
            min_tokens=0,
            thread=compiler._thread,
            slow_thread=compiler._slow_thread,
        )

    kept = anew()
    settled: list[int] = []
    for _ in range(8):
        draft: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):  # mostly along the grammar
            allowed = _allowed(anew(), settled + draft)[0]
            wild = data.draw(st.booleans()) and data.draw(st.booleans())
            choice = range(NUM_IDS) if wild else sorted(allowed)
            draft.append(data.draw(st.sampled_from(choice)))
            if draft[-1] not in allowed or draft[-1] >= END:
                break
        block = _allowed(kept, settled, draft)
        num_right = 0
        for row, found in enumerate(block):
            assert found == _allowed(anew(), settled + draft[:row])[0]
            assert found, "something is always allowed"
            num_right = row
            if row == len(draft) or draft[row] not in found or draft[row] >= END:
                break
        num_kept = data.draw(st.integers(0, num_right))
        own = data.draw(st.sampled_from(sorted(block[num_kept])))
        settled += draft[:num_kept]
        if own >= END:
            return
        settled.append(own)


def test_a_grammars_end_is_the_end_even_before_min_tokens(compiler: GrammarCompiler) -> None:
    masks = _regex(compiler, "ab?", min_tokens=5)
    assert _texts(_allowed(masks, _ids("a"))[0]) == {"b"}  # no end while there is more to say
    assert _allowed(masks, _ids("ab"))[0] == {END, OTHER_END}
    assert _allowed(_regex(compiler, "ab?"), _ids("a"))[0] == {_ids("b")[0], END, OTHER_END}


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    [allowed] = _allowed(_regex(compiler, "(.|\n)*"), [])
    assert allowed == set(range(NUM_IDS - 1))


def test_a_token_of_several_letters_is_allowed_where_all_of_them_are(
    compiler: GrammarCompiler,
) -> None:
    assert _texts(_allowed(_regex(compiler, "abx|ac"), [])[0]) == {"a", "ab"}
    choice = _compile(compiler, grammar_from("choice", json.dumps(["abc", 'a"b'])))
    assert _texts(_allowed(choice, _ids("a"))[0]) == {"b", '"'}


def test_a_row_behind_a_wrong_or_an_end_token_excludes_nothing(compiler: GrammarCompiler) -> None:
    for wrong in (_ids("x")[0], END):
        rows = _allowed(_regex(compiler, "(ab)*"), _ids("ab"), [wrong, *_ids("a")])
        assert _texts(rows[0]) == {"a", "ab"} and END in rows[0]
        assert rows[1] == rows[2] == set(range(NUM_IDS))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (grammar_from("regex", "(?=a)b"), "look-ahead"),
        (grammar_from("json", '{"type": "foo"}'), "Invalid type: foo"),
        (grammar_from("json", '{"$ref": "#"}'), "it cannot begin: no token of the vocabulary"),
        (grammar_from("regex", "é"), "it cannot begin"),  # of no token
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_at_once(
    compiler: GrammarCompiler, grammar: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        _compile(compiler, grammar)
    assert refusal.value.param == "sampling.grammar"
    assert "\n" not in refusal.value.message and len(refusal.value.message) < 500


def test_a_grammar_needs_an_end_token_of_the_model(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="needs an end token of the model"):
        _compile(compiler, JSON, end_token_ids=(3,))


def test_a_grammar_that_leads_nowhere_ends_only_an_answer_that_follows_it(
    compiler: GrammarCompiler,
) -> None:
    masks = _regex(compiler, "a(cbé|c+)")
    guess = _ids("cbc")
    masks.start(_ids("a"), guess)
    masks.take()
    masks.check(guess, [*_ids("cc"), 0, 0])  # the second guess was wrong
    with pytest.raises(InvalidRequestError, match="after 3 tokens: no token of the voc"):
        masks.check(guess, [*_ids("cbc"), 0])
    assert _texts(_allowed(masks, _ids("acc"))[0]) == {"c"}  # it begins again


_NO_PERIOD = "".join("ab"[number % 7 % 2 ^ (number // 3) % 2] for number in range(0, 999, 5))
MANY_OPTIONAL = json.dumps(
    {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(900)}}
)


@pytest.mark.parametrize(
    ("grammar", "text", "reason"),
    [
        (grammar_from("json", MANY_OPTIONAL), "{", r"Current row has \d+ items; max is 2000"),
        (grammar_from("regex", "(a|b)*a(a|b){12}"), _NO_PERIOD, "too many states: 100"),
    ],
)
def test_a_grammar_that_grows_too_complex_ends_only_an_answer_that_follows_it(
    compiler: GrammarCompiler, grammar: str, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hippo.grammars.limits._MAX_LEXER_STATES", 100)
    ids = _ids(text)
    masks = _compile(compiler, grammar)
    masks.start((), ids)
    masks.take()
    masks.check(ids, [END] * (len(ids) + 1))  # the first guess was wrong
    with pytest.raises(InvalidRequestError, match=f"sampling.grammar cannot go on .*{reason}"):
        masks.check(ids, [*ids, 0])
    messages = []
    for _ in range(2):  # the second answer ends no earlier than the first
        masks = _compile(compiler, grammar)
        with pytest.raises(InvalidRequestError, match=f"sampling.grammar cannot .*{reason}") as end:
            for length in range(len(ids) + 1):
                _allowed(masks, ids[:length])
        messages.append(end.value.message)
    assert messages[0] == messages[1]


def test_ids_that_break_the_grammar_are_an_error(compiler: GrammarCompiler) -> None:
    masks = _regex(compiler, "a*")
    masks.start(_ids("ab"), ())
    with pytest.raises(HippoError, match="does not follow"):
        masks.take()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_behind_a_thought_the_masks_are_those_of_the_form_alone(
    compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """Whatever of the thought was settled and whatever guessed; within it every token is allowed,
    except end tokens before min_tokens."""
    mark = NUM_IDS - 1
    min_tokens = data.draw(st.integers(0, 8))
    masks = _regex(compiler, "(ab|abc|x)*1+", min_tokens=min_tokens)
    masks.begin_behind(mark)
    everything = set(range(NUM_IDS))
    thought = data.draw(st.lists(st.integers(0, mark - 1), max_size=5))
    form = data.draw(st.sampled_from(["", "ab", "abc1", "x11", "c", "abx"]))
    ids = [*thought, *data.draw(st.sampled_from([[mark], []]))]
    if mark in ids:
        ids += [*_ids(form), *data.draw(st.sampled_from([[], [mark]]))]
    for _ in range(3):
        num_settled = data.draw(st.integers(0, len(ids)))
        if mark in ids[:num_settled]:  # what is settled follows the form
            num_settled = min(num_settled, len(thought) + 1 + (form != "c") * len(_ids(form)))
        rows = _allowed(masks, ids[:num_settled], ids[num_settled:])
        for row, allowed in enumerate(rows, num_settled):
            held = {END, OTHER_END} if row < min_tokens else set()
            if row <= len(thought) or mark not in ids[:row]:
                assert allowed == everything - held
                continue
            said = ids[len(thought) + 1 : row]
            alone = _regex(
                compiler, "(ab|abc|x)*1+", min_tokens=max(min_tokens - row + len(said), 0)
            )
            prefix = _allowed(alone, [], said)
            if any(one not in able for one, able in zip(said, prefix, strict=False)):
                assert allowed == everything  # never used
            else:
                assert allowed == prefix[-1]
