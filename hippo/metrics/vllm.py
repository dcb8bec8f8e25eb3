"""The metrics with vLLM's names and meanings, which dashboards and `vllm bench serve` read."""

from hippo.metrics.spec import Label, Metric, counter, gauge, histogram

MODEL_NAME = Label("model_name", bound="the served model")
FINISHED_REASONS = ("stop", "length", "abort", "error")

# Upper bounds of histogram buckets.
COMPLETION_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 300.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0,
)  # fmt: skip
PROMPT_TOKENS = (
    16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 24576.0, 32768.0,
    65536.0, 131072.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0,
)  # fmt: skip
# A step of the bundled pair takes 0.5 ms, a step of a 72B model 50 ms.
STEP_SECONDS = (
    0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01,
    0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip

NUM_REQUESTS_RUNNING = gauge(
    "vllm:num_requests_running", "Requests that hold a slot of the target.", MODEL_NAME
)
NUM_REQUESTS_WAITING = gauge(
    "vllm:num_requests_waiting",
    "Requests whose prompt is being prepared, or that wait for a slot of the target.",
    MODEL_NAME,
)
NUM_PROMPT_TOKENS = counter(
    "vllm:prompt_tokens", "Prompt tokens, visual tokens included.", MODEL_NAME
)
PREFIX_CACHE_QUERIES = counter(
    "vllm:prefix_cache_queries",
    "Prompt tokens of all prefills, which are looked up in the target's prefix cache.",
    MODEL_NAME,
)
PREFIX_CACHE_HITS = counter(
    "vllm:prefix_cache_hits", "Prompt tokens found in the target's prefix cache.", MODEL_NAME
)
NUM_GENERATION_TOKENS = counter("vllm:generation_tokens", "Completion tokens settled.", MODEL_NAME)
REQUEST_SUCCESS = counter(
    "vllm:request_success",
    "Requests ended, by reason: an end token or stop string, the token limit, a client that "
    "disconnected, or an error.",
    MODEL_NAME,
    Label("finished_reason", FINISHED_REASONS),
)
NUM_DRAFTS = counter(
    "vllm:spec_decode_num_drafts", "Target forwards with draft tokens.", MODEL_NAME
)
NUM_DRAFT_TOKENS = counter(
    "vllm:spec_decode_num_draft_tokens", "Draft tokens in target forwards.", MODEL_NAME
)
NUM_ACCEPTED_TOKENS = counter(
    "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", MODEL_NAME
)
NUM_ACCEPTED_TOKENS_PER_POS = counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens accepted, by their position in the forward.",
    MODEL_NAME,
    Label("position", bound="0 to `--max-draft-tokens` - 1"),
)
TIME_TO_FIRST_TOKEN = histogram(
    "vllm:time_to_first_token_seconds",
    "Time from the request's arrival to its first token.",
    REQUEST_SECONDS,
    MODEL_NAME,
)
INTER_TOKEN_LATENCY = histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two verdicts of an answer, each of one or several tokens; a reader of the "
    "stream sees it as a pause.",
    STEP_SECONDS,
    MODEL_NAME,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "vllm:time_per_output_token_seconds",
    "The same as `vllm:inter_token_latency_seconds`, under the name that older dashboards read.",
    STEP_SECONDS,
    MODEL_NAME,
)
REQUEST_TIME_PER_OUTPUT_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per token after the first, one observation per answer.",
    STEP_SECONDS,
    MODEL_NAME,
)
E2E_REQUEST_LATENCY = histogram(
    "vllm:e2e_request_latency_seconds",
    "Time from the request's arrival to its last token, of answers that ended normally.",
    REQUEST_SECONDS,
    MODEL_NAME,
)
REQUEST_QUEUE_TIME = histogram(
    "vllm:request_queue_time_seconds",
    "Time waiting for a slot of the target.",
    REQUEST_SECONDS,
    MODEL_NAME,
)
REQUEST_PREFILL_TIME = histogram(
    "vllm:request_prefill_time_seconds",
    "Device time of the target's prefill.",
    REQUEST_SECONDS,
    MODEL_NAME,
)
REQUEST_DECODE_TIME = histogram(
    "vllm:request_decode_time_seconds",
    "Time from the first token to the last.",
    REQUEST_SECONDS,
    MODEL_NAME,
)
REQUEST_PROMPT_TOKENS = histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of one request.", PROMPT_TOKENS, MODEL_NAME
)
REQUEST_GENERATION_TOKENS = histogram(
    "vllm:request_generation_tokens",
    "Completion tokens of one request.",
    COMPLETION_TOKENS,
    MODEL_NAME,
)

VLLM_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
