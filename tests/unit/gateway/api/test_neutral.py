"""Fields of other servers' requests: none is unknown, and what changes nothing is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params as openai_params
from openai.types.chat.chat_completion_assistant_message_param import (
    ChatCompletionAssistantMessageParam,
)
from openai.types.chat.chat_completion_content_part_image_param import (
    ChatCompletionContentPartImageParam,
)
from openai.types.chat.chat_completion_content_part_text_param import (
    ChatCompletionContentPartTextParam,
)
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from pydantic import ValidationError

from gateway.api import neutral
from gateway.api.media_schemas import ContentPart, Model
from gateway.api.schemas import ChatCompletionRequest, Message
from gateway.api.structured import StructuredOutputs

DOCS = Path(__file__).parents[4] / "docs/api.md"

# The fields of vLLM's ChatCompletionRequest and StructuredOutputsParams, in releases 0.6 to 0.20,
# that OpenAI's request does not have.
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
    chat_template chat_template_kwargs continue_final_message documents early_stopping
    ec_transfer_params echo guided_choice guided_decoding_backend guided_grammar guided_json
    guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors logprob_token_ids media_io_kwargs min_p
    min_tokens mm_processor_kwargs priority prompt_logprobs repetition_detection repetition_penalty
    request_id return_assistant_tokens_mask return_mm_kwargs return_prompt_text return_token_ids
    return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking
""".split()
VLLM_FORMS = """
    choice disable_additional_properties disable_any_whitespace grammar json json_object regex
    disable_fallback structural_tag whitespace_pattern
""".split()

PART = {"type": "text", "text": "Hi"}
MESSAGE = {"role": "assistant", "content": [PART]}
TABLES: dict[str, tuple[type[Model], Mapping[str, neutral.Neutral], dict[str, Any]]] = {
    "request": (
        ChatCompletionRequest,
        neutral.REQUEST,
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    ),
    "message": (Message, neutral.MESSAGE, MESSAGE),
    "part": (ContentPart, neutral.PART, PART),
    "structured_outputs": (StructuredOutputs, neutral.STRUCTURED_OUTPUTS, {"regex": "a"}),
}


def published() -> Iterator[tuple[str, str]]:
    """Yields (table, field) of each field of OpenAI's and vLLM's requests."""
    names = [*openai_params.CompletionCreateParamsBase.__annotations__, "stream", *VLLM]
    yield from (("request", name) for name in names)
    said = [*ChatCompletionAssistantMessageParam.__annotations__, "tool_call_id"]
    said += [*ChatCompletionMessage.model_fields, "reasoning", "reasoning_content"]
    yield from (("message", name) for name in dict.fromkeys(said))
    parts = (ChatCompletionContentPartTextParam, ChatCompletionContentPartImageParam)
    named = [name for part in parts for name in part.__annotations__]
    yield from (("part", name) for name in dict.fromkeys([*named, "cache_control", "uuid"]))
    yield from (("structured_outputs", name) for name in VLLM_FORMS)


@pytest.mark.parametrize(("table", "name"), [*published()])
def test_no_published_field_is_unknown(table: str, name: str) -> None:
    model, fields, _ = TABLES[table]
    known = {field.alias or key for key, field in model.model_fields.items()}
    assert (name in known) != (name in fields)  # takes effect, or is in the table


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table, (_, fields, _) in TABLES.items() for name in fields],
)
def test_neutral_values_change_nothing_and_others_are_refused_with_the_reason(
    table: str, name: str
) -> None:
    model, fields, plain = TABLES[table]
    field, expected = fields[name], model.model_validate(plain)
    values = ("any", {"thing": [1]}) if field.values is None else field.values
    for value in (None, *values):
        assert model.model_validate({**plain, name: value}) == expected
    if field.values is not None:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({**plain, name: "something else"})
        (error,) = caught.value.errors()
        assert error["type"] == "unsupported_field" and error["ctx"]["field"] == name
        assert field.why and field.why in error["msg"]


def test_as_many_answers_as_are_decoded_change_nothing() -> None:
    plain = TABLES["request"][2]
    expected = ChatCompletionRequest.model_validate({**plain, "n": 2})
    assert ChatCompletionRequest.model_validate({**plain, "n": 2, "best_of": 2}) == expected
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({**plain, "n": 2, "best_of": 3})


def test_an_assistants_content_may_be_null_or_missing() -> None:
    empty = Message.model_validate({"role": "assistant", "content": ""})
    assert Message.model_validate({"role": "assistant", "content": None}) == empty
    assert Message.model_validate({"role": "assistant", "tool_calls": []}) == empty
    for said in ({"role": "user", "content": None}, {"role": "user"}):
        with pytest.raises(ValidationError):
            Message.model_validate(said)


def test_the_table_is_in_the_api_document() -> None:
    """Each field in the row of the first of its values."""
    rows = {}
    table = DOCS.read_text().split("**Fields without effect.**")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        title, text = line.strip("| ").split(" | ")
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", text), title))
    for _, fields, _ in TABLES.values():
        for name, field in fields.items():
            first = field.values[0] if field.values else None
            if field.values is None:
                expected = {"any"}
            elif isinstance(first, (bool, int)) and first != -1:
                expected = {json.dumps(first)}
            elif first in ([], {}, ""):
                expected = {"empty"}
            else:
                expected = {"a word", "null alone"}
            assert rows[name] in expected, name
