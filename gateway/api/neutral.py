"""Fields of OpenAI's and vLLM's requests that have no effect here: what each may say, and why.

A value that would not change the answer on their servers is taken, and any other is refused with
the reason. Unknown fields are refused too (``gateway.api.media_schemas.Model``).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values of a field that change nothing, beside null (None: all); ``why`` is what a refusal
    of another says."""

    values: tuple[Any, ...] | None
    why: str = ""

    def takes(self, value: Any) -> bool:
        """Whether a value changes nothing; unlike ==, tells true from 1."""
        taken = [(isinstance(each, bool), each) for each in (None, *(self.values or ()))]
        return self.values is None or (isinstance(value, bool), value) in taken

    def refusal(self, value: Any) -> str:
        """Returns what is wrong with a value that is not taken."""
        named = " or ".join(map(repr, self.values or ()))
        instead = f"leave it out or give {named}" if named else "leave it out"
        shown = repr(value[:60] if isinstance(value, str) else value)
        if isinstance(value, (list, dict)) and value:  # it may be large
            shown = "a list" if isinstance(value, list) else "an object"
        return f"is {shown}, but {self.why}; {instead}"


INERT = Neutral(None)
_NO_TOOLS = "this server calls no tools"
_NO_TEMPLATES = "prompts have the form of the checkpoint's own chat template"
_TEXT_ONLY = "answers are text"
_ALL_READ = "a prompt is read whole; one that is too long is refused"
_ONE_NODE = "this server hands no caches to others"

REQUEST = {
    # OpenAI
    "audio": Neutral((), _TEXT_ONLY),
    "function_call": Neutral(("none", "auto"), _NO_TOOLS),
    "functions": Neutral(([],), _NO_TOOLS),
    "metadata": INERT,
    "modalities": Neutral((["text"],), _TEXT_ONLY),
    "moderation": Neutral((), "this server moderates nothing"),
    "parallel_tool_calls": INERT,  # without tools
    "prediction": INERT,  # changes only the speed
    "prompt_cache_key": INERT,
    "prompt_cache_options": INERT,
    "prompt_cache_retention": INERT,
    "safety_identifier": INERT,
    "service_tier": INERT,
    "store": INERT,
    "tool_choice": Neutral(("none", "auto"), _NO_TOOLS),
    "tools": Neutral(([],), _NO_TOOLS),
    "user": INERT,
    "verbosity": Neutral(("medium",), "these models take it from the prompt alone"),
    "web_search_options": Neutral((), "this server searches nothing"),
    # vLLM, of the text
    "allowed_token_ids": Neutral((), "logit_bias and structured_outputs limit the tokens here"),
    "bad_words": Neutral(([],), "logit_bias and structured_outputs limit the tokens here"),
    "best_of": Neutral((1,), "each of the n choices is decoded once"),
    "early_stopping": Neutral((False,), "there is no beam search"),
    "include_stop_str_in_output": Neutral((False,), "the text ends before a stop string"),
    "length_penalty": Neutral((1,), "there is no beam search"),
    "logits_processors": Neutral(([],), "requests bring no code"),
    "repetition_detection": Neutral((), "max_tokens and stop end an answer here"),
    "skip_special_tokens": Neutral((True,), "the text is the answer without special tokens"),
    "spaces_between_special_tokens": INERT,  # the text has none
    "use_beam_search": Neutral((False,), "there is no beam search"),
    "watermarking": Neutral((False,), "answers have no watermark"),
    # vLLM, of the prompt
    "add_generation_prompt": Neutral((True,), "every answer is a message of its own"),
    "add_special_tokens": Neutral((False,), _NO_TEMPLATES),
    "chat_template": Neutral((), _NO_TEMPLATES),
    "continue_final_message": Neutral((False,), "every answer is a message of its own"),
    "documents": Neutral(([],), _NO_TEMPLATES),
    "echo": Neutral((False,), "the text is the answer alone"),
    "truncate_prompt_tokens": Neutral((), _ALL_READ),
    "truncation_side": INERT,  # without truncate_prompt_tokens
    # vLLM, of structured output
    "guided_decoding_backend": INERT,
    "guided_grammar": Neutral((), "a form is a JSON schema, a regular expression or a choice here"),
    "guided_whitespace_pattern": Neutral((), "JSON has one line here; guided_regex takes others"),
    "structural_tag": Neutral((), "a form holds for the whole answer"),
    # vLLM, of thoughts
    "thinking_token_budget": Neutral((-1,), "max_tokens limits thought and content together"),
    # vLLM, of what is sent back
    "logprob_token_ids": Neutral((), "top_logprobs says of which tokens"),
    "prompt_logprobs": Neutral((), "only the answer has log-probabilities"),
    "request_id": INERT,  # the header X-Request-Id names a request
    "return_assistant_tokens_mask": Neutral((False,), "the prompt is not sent back"),
    "return_mm_kwargs": INERT,
    "return_prompt_text": Neutral((False,), "the prompt is not sent back"),
    "return_token_offsets": INERT,
    "return_tokens_as_token_ids": Neutral((False,), "return_token_ids sends the ids"),
    "routed_experts_prompt_start": Neutral((0,), "the experts' choices are not sent back"),
    "stream_interval": INERT,  # the text is the same
    # vLLM, of the server
    "ec_transfer_params": Neutral(({},), _ONE_NODE),
    "kv_transfer_params": Neutral(({},), _ONE_NODE),
    "priority": Neutral((0,), "requests are served in the order in which they came"),
    "session_id": INERT,
    "vllm_xargs": Neutral(({},), "this server has no such extensions"),
}
MESSAGE = {
    "annotations": Neutral(([],), "an earlier answer is read as text alone"),
    "audio": Neutral((), _TEXT_ONLY),
    "function_call": Neutral((), _NO_TOOLS),
    "name": INERT,
    "parsed": INERT,  # OpenAI's client adds it to a structured answer, beside the content
    "refusal": Neutral((), "an earlier answer is read as text alone"),
    "tool_call_id": Neutral((), _NO_TOOLS),
    "tool_calls": Neutral(([],), _NO_TOOLS),
}
PART = {"cache_control": INERT, "prompt_cache_breakpoint": INERT}
STRUCTURED_OUTPUTS = {
    "disable_additional_properties": Neutral(
        (False,), "the schema says which properties there are"
    ),
    "disable_any_whitespace": Neutral((False,), "JSON has one line, with at most one space, here"),
    "disable_fallback": INERT,
    "grammar": REQUEST["guided_grammar"],
    "structural_tag": REQUEST["structural_tag"],
    "whitespace_pattern": REQUEST["guided_whitespace_pattern"],
}
