"""Fields of other servers' requests: none is unknown, and what changes nothing is taken.

docs/api.md names every field of a request and of an answer's figures, and every kind of event."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types import chat
from openai.types.chat import completion_create_params as openai_params
from pydantic import BaseModel, ValidationError

from gateway.answer import event_schemas, figures
from gateway.answer.figures import UsageResponse
from gateway.api import media_schemas, schemas, structured
from gateway.api.schemas import ChatCompletionRequest, Message
from tests.support.running.gateways import chat_request

ROOT = Path(__file__).parents[4]
DOCS = (ROOT / "docs/api.md").read_text("utf-8")

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
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TABLES: dict[str, tuple[type[media_schemas.Model], dict[str, Any]]] = {
    "request": (ChatCompletionRequest, REQUEST),
    "message": (Message, MESSAGE),
    "part": (media_schemas.ContentPart, PART),
    "structured_outputs": (structured.StructuredOutputs, {"regex": "a"}),
}


def published() -> Iterator[tuple[str, str]]:
    """Yields (table, field) of each field of OpenAI's and vLLM's requests."""
    names = [*openai_params.CompletionCreateParamsBase.__annotations__, "stream", *VLLM]
    yield from (("request", name) for name in names)
    said = [*chat.ChatCompletionAssistantMessageParam.__annotations__, "tool_call_id"]
    said += [*chat.ChatCompletionMessage.model_fields, "reasoning", "reasoning_content"]
    yield from (("message", name) for name in dict.fromkeys(said))
    parts = (chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartImageParam)
    named = [name for part in parts for name in part.__annotations__]
    yield from (("part", name) for name in dict.fromkeys([*named, "cache_control", "uuid"]))
    yield from (("structured_outputs", name) for name in VLLM_FORMS)


@pytest.mark.parametrize(("table", "name"), [*published()])
def test_no_published_field_is_unknown(table: str, name: str) -> None:
    model, _ = TABLES[table]
    known = {field.alias or key for key, field in model.model_fields.items()}
    assert (name in known) != (name in model.neutral)  # takes effect, or is in the table


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table, (model, _) in TABLES.items() for name in model.neutral],
)
def test_neutral_values_change_nothing_and_others_are_refused_with_the_reason(
    table: str, name: str
) -> None:
    model, plain = TABLES[table]
    field, expected = model.neutral[name], model.model_validate(plain)
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
    assert chat_request(n=2, best_of=2) == chat_request(n=2)
    with pytest.raises(ValidationError):
        chat_request(n=2, best_of=3)


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
    table = DOCS.split("**Fields without effect.**")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        title, text = line.strip("| ").split(" | ")
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", text), title))
    for model, _ in TABLES.values():
        for name, field in model.neutral.items():
            first = field.values[0] if field.values else None
            if isinstance(first, (bool, int)) and first != -1:
                expected = {json.dumps(first)}
            else:
                expected = {"empty"} if first in ([], {}, "") else {"a word", "null alone"}
            assert rows[name] in ({"any"} if field.values is None else expected), name


def _models(*modules: object) -> list[type[BaseModel]]:
    found = (each for module in modules for each in vars(module).values())
    return [each for each in found if isinstance(each, type) and issubclass(each, BaseModel)]


EVENTS = _models(event_schemas)
NAMED = [
    model
    for model in _models(media_schemas, structured, schemas, figures)
    if model.model_fields and model is not UsageResponse  # whose names are OpenAI's
]


@pytest.mark.parametrize("model", NAMED, ids=lambda model: str(model.__name__))
def test_every_field_is_in_the_document(model: type[BaseModel]) -> None:
    page = re.sub(r"```.*?```", "", DOCS, flags=re.DOTALL)
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    assert set(model.model_fields) - told == set()


def test_every_kind_of_event_has_its_row() -> None:
    table = DOCS.split("## Events of a stream")[1].split("\n## ")[0]
    title, *rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    kinds = [model.model_fields["type"] for model in EVENTS if model.__name__.endswith("Event")]
    assert (title, set(rows)) == ("type", {get_args(kind.annotation)[0] for kind in kinds})


def test_the_page_reads_fields_that_there_are() -> None:
    known = {name for model in EVENTS for name in model.model_fields}
    script = (ROOT / "hippo/page/run.js").read_text("utf-8")
    assert set(re.findall(r"\bevent\.(\w+)", script)) - known == set()
