"""Which forms of an answer are taken, and the grammars that they become."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.api.structured import check_support, checked_grammar, constrained_by
from hippo.errors import InvalidRequestError
from hippo.grammars.trials import GrammarTrials
from tests.support.models.letters import letter_tokenizer
from tests.support.running.gateways import chat_request
from tests.support.running.info import small_model_info

INFO = small_model_info()
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials()
    yield trials
    trials.close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": {"json_object": False}}, None),
        ({"response_format": FORMAT}, "response_format.json_schema.schema"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": ["a", "a", ""]}, "guided_choice"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a/b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["\\", "é☃"]}}, "structured_outputs.choice"),
    ],
)
async def test_a_form_is_a_grammar_of_its_field(
    trials: GrammarTrials, fields: dict[str, Any], field: str | None
) -> None:
    request = chat_request(**fields)
    assert constrained_by(request) == field
    grammar = await checked_grammar(request, trials)
    assert bool(grammar) == (field is not None)
    if field is None:
        check_support(request, INFO)
        return
    assert not LLMatcher.validate_grammar(grammar)
    check_support(request, dataclasses.replace(INFO, takes_grammars=True))
    with pytest.raises(InvalidRequestError, match=f"{field} is not supported by the target"):
        check_support(request, INFO)


@pytest.mark.parametrize(
    ("further", "texts"),
    [
        ({}, {'{"b":1,"a":2}': True, '{"b": 1, "a": 2}': True, '{"a": 2, "b": 1}': False,
              '{"b" : 1}': False, '{"b":  1}': False, '{\n"b": 1}': False}),
        ({"x-guidance": {"whitespace_flexible": True}}, {'{\n "b" :\t1 ,  "a": 2\n}': True}),
    ],
)  # fmt: skip
async def test_json_is_on_one_line_unless_the_schema_says_otherwise(
    trials: GrammarTrials, further: dict[str, Any], texts: dict[str, bool]
) -> None:
    letters = sorted({*"".join(texts)})
    tokenizer = LLTokenizer(letter_tokenizer(letters, ["<end>"]).decode(), eos_token=len(letters))
    grammar = await checked_grammar(chat_request(guided_json=SCHEMA | further), trials)
    for text, is_allowed in texts.items():
        matcher = LLMatcher(tokenizer, grammar)
        ids = [letters.index(letter) for letter in text]
        assert (matcher.validate_tokens(ids) == len(ids)) == is_allowed, text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70000) | st.sampled_from(["string", "(", "#", "a"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["type", "enum", "items", "properties", "anyOf", "allOf", "$ref", "pattern", "maxItems",
             "minLength", "format", "required", "additionalProperties", "const", "x-guidance"]
        ),
        inner,
        max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(["type", "enum", "items", "anyOf", "properties",
                                               "$defs", "pattern"]), JSON_VALUES, max_size=3),
       regex=st.text("ab()[]{}|*+?\\^$.1,-", max_size=12))  # fmt: skip
async def test_any_schema_and_any_expression_is_taken_or_refused_by_name(
    trials: GrammarTrials, schema: dict[str, Any], regex: str
) -> None:
    for fields in ({"guided_json": schema}, {"guided_regex": regex}):
        (name,) = fields
        try:
            await checked_grammar(chat_request(**fields), trials)
        except InvalidRequestError as error:
            assert error.param == name and error.message.startswith(name)
