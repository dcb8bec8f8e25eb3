"""The names that clients, dashboards and `vllm bench serve` know, with vLLM's meaning of them."""

from __future__ import annotations

from hippo.metrics.buckets import COMPLETION_TOKENS, PROMPT_TOKENS, REQUEST_SECONDS, STEP_SECONDS
from hippo.metrics.spec import Kind, Label, Metric

MODEL_NAME = Label("model_name", bound="the served model")
FINISHED_REASONS = ("stop", "length", "abort", "error")

NUM_REQUESTS_RUNNING = Metric(
    "vllm:num_requests_running",
    Kind.GAUGE,
    "Requests that hold a slot of the target.",
    (MODEL_NAME,),
)
NUM_REQUESTS_WAITING = Metric(
    "vllm:num_requests_waiting",
    Kind.GAUGE,
    "Requests whose prompt is being read or that wait for a slot of the target.",
    (MODEL_NAME,),
)
NUM_PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens", Kind.COUNTER, "Prompt tokens read, visual ones included.", (MODEL_NAME,)
)
PREFIX_CACHE_QUERIES = Metric(
    "vllm:prefix_cache_queries",
    Kind.COUNTER,
    "Prompt tokens whose keys and values the target could have had already: those of all prefills.",
    (MODEL_NAME,),
)
PREFIX_CACHE_HITS = Metric(
    "vllm:prefix_cache_hits", Kind.COUNTER, "Of these, the ones that it had.", (MODEL_NAME,)
)
NUM_GENERATION_TOKENS = Metric(
    "vllm:generation_tokens", Kind.COUNTER, "Completion tokens settled.", (MODEL_NAME,)
)
REQUEST_SUCCESS = Metric(
    "vllm:request_success",
    Kind.COUNTER,
    "Requests ended, by how: an end token or stop string, the token limit, a client that went "
    "away, or an error.",
    (MODEL_NAME, Label("finished_reason", FINISHED_REASONS)),
)
NUM_DRAFTS = Metric(
    "vllm:spec_decode_num_drafts",
    Kind.COUNTER,
    "Forwards of the target that held draft tokens.",
    (MODEL_NAME,),
)
NUM_DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens",
    Kind.COUNTER,
    "Draft tokens in these forwards.",
    (MODEL_NAME,),
)
NUM_ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens",
    Kind.COUNTER,
    "Draft tokens accepted.",
    (MODEL_NAME,),
)
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    Kind.COUNTER,
    "Draft tokens accepted, by their position in the forward.",
    (MODEL_NAME, Label("position", bound="0 to `--max-draft-tokens` - 1")),
)
TIME_TO_FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From the request's arrival to its first token.",
    (MODEL_NAME,),
    REQUEST_SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    "vllm:inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Between two verdicts of one answer, each of one token or several: what a reader of the "
    "stream waits.",
    (MODEL_NAME,),
    STEP_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "The same as `vllm:inter_token_latency_seconds`, under the name that older dashboards read.",
    (MODEL_NAME,),
    STEP_SECONDS,
)
REQUEST_TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "Mean time per token after the first, one observation an answer.",
    (MODEL_NAME,),
    STEP_SECONDS,
)
E2E_REQUEST_LATENCY = Metric(
    "vllm:e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "From the request's arrival to its last token, of answers that came to their end.",
    (MODEL_NAME,),
    REQUEST_SECONDS,
)
REQUEST_QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    Kind.HISTOGRAM,
    "Waiting for a slot of the target.",
    (MODEL_NAME,),
    REQUEST_SECONDS,
)
REQUEST_PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    Kind.HISTOGRAM,
    "Device time of the target's prefill.",
    (MODEL_NAME,),
    REQUEST_SECONDS,
)
REQUEST_DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    Kind.HISTOGRAM,
    "From the first token to the last.",
    (MODEL_NAME,),
    REQUEST_SECONDS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens",
    Kind.HISTOGRAM,
    "Prompt tokens of one request.",
    (MODEL_NAME,),
    PROMPT_TOKENS,
)
REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens",
    Kind.HISTOGRAM,
    "Completion tokens of one request.",
    (MODEL_NAME,),
    COMPLETION_TOKENS,
)

VLLM_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
