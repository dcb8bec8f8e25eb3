"""What a chat template knows of thoughts, and the prompts of conversations that have some."""

from types import SimpleNamespace

import pytest

from hippo.errors import InvalidRequestError
from hippo.models.cached import CachedModel
from hippo.models.prompts.messages import template_names
from hippo.types import ChatMessage, FramePlan, TextPart
from tests.support.models.families import THINKING, write_thinking
from tests.support.models.pairs import load
from tests.support.models.reference import clip, user

LIKE_QWEN = """{%- macro shown(of) %}{% if add_vision_id %}{{ bos_token }}{% endif %}{% endmacro %}
{%- set ns = namespace(last=messages|length - 1) %}{% for i in range(3) %}{% continue %}{% endfor %}
{%- if tools %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%d') }}
{%- if preserve_thinking is undefined or preserve_thinking %}
{%- generation %}a{% endgeneration -%}{% endif %}
{%- if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}"""


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (LIKE_QWEN, ("add_vision_id", "enable_thinking", "preserve_thinking")),
        ({"default": THINKING}, ("enable_thinking", "preserve_thinking", "reasoning_effort")),
        (None, ()),
    ],
)
def test_a_template_tells_what_it_may_be_given(template: object, names: tuple[str, ...]) -> None:
    assert template_names(SimpleNamespace(chat_template=template)) == names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CachedModel:
    return load(write_thinking(tmp_path_factory.mktemp("thinking")))


def test_the_question_is_found_behind_thoughts_that_are_kept_or_left_out(
    model: CachedModel,
) -> None:
    tokenizer = model._prompts._processor.tokenizer
    answer = ChatMessage("assistant", (TextPart("a thing"),), thought="a thing? <|im_end|>")
    messages = [*user(0, "what is it?"), answer, *user("and where?")]
    lengths = set()
    for kept in (True, False):
        values = {"preserve_thinking": kept, "unknown": 1}
        prompt = model.prepare_prompt(messages, [clip()], FramePlan(), template_values=values)
        assert tokenizer.decode(prompt.input_ids[prompt.question_indices]) == "and where?"
        assert ("a thing? <|im_end|>" in tokenizer.decode(prompt.input_ids)) == kept
        assert prompt.input_ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3
        lengths.add(prompt.length)
    assert len(lengths) == 2


def test_a_prompt_says_whether_it_ends_inside_a_thought(model: CachedModel) -> None:
    end = model._prompts._processor.tokenizer.convert_tokens_to_ids("</think>")
    for values, ends in (({}, end), ({"enable_thinking": False}, None)):
        prompt = model.prepare_prompt(user("<think>"), [], FramePlan(), template_values=values)
        assert prompt.thought_end_id == ends


def test_a_value_that_breaks_the_template_is_refused(model: CachedModel) -> None:
    with pytest.raises(InvalidRequestError, match="no such effort"):
        model.prepare_prompt(
            user("Hi"), [], FramePlan(), template_values={"reasoning_effort": "most"}
        )
