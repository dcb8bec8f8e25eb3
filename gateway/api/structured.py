"""Structured output: which fields of a request constrain its answer, and their grammar.

The gateway tries a grammar before it reads media, with bytes as tokens; the services try it with
their tokenizer, and compile it.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from llguidance import LLMatcher, grammar_from
from pydantic import Field, StrictBool, model_validator

from gateway.api.media_schemas import Model, field_error, refusal, refusal_of
from gateway.api.neutral import STRUCTURED_OUTPUTS, Neutral
from hippo.base.validation import MAX_GRAMMAR_LENGTH
from hippo.grammars.limits import one_line
from hippo.grammars.trials import GrammarTrials
from hippo.types import ModelInfo

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 1024
MAX_NAME_LENGTH = 256
# Where any white space is allowed, some models write it without end. A schema may say otherwise.
_ON_ONE_LINE: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

_OBJECT = {"type": "object"}
Schema = dict[str, Any] | str
ChoiceList = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(Model):
    """The schema of a response_format."""

    name: str = Field(max_length=MAX_NAME_LENGTH)
    """Inert."""
    description: str | None = None
    """Inert."""
    json_schema: dict[str, Any] = Field(alias="schema")
    """A JSON schema, which the answer follows."""
    strict: StrictBool | None = None
    """Inert; every answer follows the schema."""


class ResponseFormat(Model):
    """The form of the answer, as in OpenAI."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal(
                "the type json_schema needs the field json_schema, and other types cannot have it"
            )
        return self


class StructuredOutputs(Model):
    """The form of the answer, as in vLLM; one of the fields."""

    neutral: ClassVar[Mapping[str, Neutral]] = STRUCTURED_OUTPUTS

    json_schema: Schema | None = Field(default=None, alias="json")
    """A JSON schema, which the answer follows."""
    json_object: StrictBool | None = None
    """Any JSON object."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: ChoiceList | None = None
    """The answer is one of these."""


class StructuredFields(Model):
    """The fields of a chat completion request that constrain its answer; one of them at most."""

    response_format: ResponseFormat | None = None
    """Text (the default), a JSON object, or JSON by a schema."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    """A JSON schema, which the answer follows; vLLM's earlier name."""
    guided_regex: str | None = None
    """The whole answer matches it; vLLM's earlier name."""
    guided_choice: ChoiceList | None = None
    """The answer is one of these; vLLM's earlier name."""

    @model_validator(mode="after")
    def _one_constrains(self) -> "StructuredFields":
        fields = [field for field, *_ in _constraints(self)]
        if len(fields) > 1:
            raise refusal_of(fields[1], f"and {fields[0]} both constrain the answer; give one")
        return self


def constrained_by(request: StructuredFields) -> str | None:
    """Returns the path of the field that constrains the answer; None if no field does."""
    return next((field for field, *_ in _constraints(request)), None)


async def checked_grammar(request: StructuredFields, trials: GrammarTrials) -> str:
    """Returns the grammar of the answer; empty: any text.

    Raises InvalidRequestError, with the field as ``param``, for a schema, regular expression or
    list that is wrong or too costly; OverloadedError and UnavailableError as ``GrammarTrials``.
    """
    for field, kind, value in _constraints(request):
        grammar = await asyncio.to_thread(_grammar, field, kind, value)
        await trials.check(grammar, field)
        return grammar
    return ""


def check_support(request: StructuredFields, info: ModelInfo) -> None:
    """Raises InvalidRequestError if the target service, which ``info`` describes, would ignore the
    grammar."""
    field = constrained_by(request)
    if field is not None and not info.takes_grammars:
        raise field_error(
            field,
            f"is not supported by the target service of {info.name}: it is of an earlier release, "
            "or llguidance cannot read its tokenizer",
        )


def _constraints(request: StructuredFields) -> list[tuple[str, str, Any]]:
    """Returns (path, llguidance's name of the kind, value) of each field that constrains."""
    given = request.response_format or ResponseFormat(type="text")
    outputs, schema = request.structured_outputs or StructuredOutputs(), given.json_schema
    found = [
        ("response_format", "json", _OBJECT if given.type == "json_object" else None),
        ("response_format.json_schema.schema", "json", schema and schema.json_schema),
        ("structured_outputs.json", "json", outputs.json_schema),
        ("structured_outputs.json_object", "json", _OBJECT if outputs.json_object else None),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "choice", outputs.choice),
        ("guided_json", "json", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
    ]
    return [(field, kind, value) for field, kind, value in found if value is not None]


def _grammar(field: str, kind: Any, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_GRAMMAR_LENGTH:
        why = f"has {len(text):,} letters; at most {MAX_GRAMMAR_LENGTH:,} are allowed"
        raise field_error(field, why)
    try:
        if kind == "json":
            return LLMatcher.grammar_from_json_schema(text, defaults=_ON_ONE_LINE)
        return grammar_from(kind, text)
    except (ValueError, RecursionError) as error:
        raise field_error(field, f"cannot be used: {one_line(str(error))}") from None
