"""The first page: is it fast, is it well, who uses it."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, quantiles, rate

_BASELINE = rate('hippo_decode_baseline_seconds_total{policy!="off"}')
_DECODE = rate('hippo_decode_seconds_total{policy!="off"}')
_FIRST = rate('hippo_first_token_seconds_total{policy!="off"}')
SPEEDUP = f"{_BASELINE} / {_DECODE}"
END_TO_END = f"({_BASELINE} + {_FIRST}) / ({_DECODE} + {_FIRST})"
ACCEPTED = rate("vllm:spec_decode_num_accepted_tokens_total")
TIMES = "suffix:×"

OVERVIEW = Dashboard(
    "hippo-overview",
    "hippo: overview",
    "How much faster the pair is than the target alone, and how the service does.",
    (
        Panel(
            title="How many times as fast as the target alone is decoding now?",
            text="First token to last, against the measured time that target-only decoding takes "
            "for the same tokens at the same context length. Below 1, speculation costs time.",
            unit=TIMES,
            kind="stat",
            width=6,
            height=5,
            line=1,
            queries=(Query(SPEEDUP, "decode"),),
        ),
        Panel(
            title="And from the request to its last token?",
            text="The same with the time to the first token, which speculation does not shorten, "
            "on both sides.",
            unit=TIMES,
            kind="stat",
            width=6,
            height=5,
            line=1,
            queries=(Query(END_TO_END, "end to end"),),
        ),
        Panel(
            title="How much of what the draft proposes is accepted?",
            text="Accepted over verified draft tokens. A good pair is above 80 %.",
            unit="percentunit",
            kind="stat",
            width=6,
            height=5,
            line=0.3,
            queries=(
                Query(
                    f"{ACCEPTED} / {rate('vllm:spec_decode_num_draft_tokens_total')}", "accepted"
                ),
            ),
        ),
        Panel(
            title="Are draft and target there?",
            text="1 while the gateway can use the service. Without the target no question is "
            "answered; without the draft answers are slow.",
            unit="none",
            kind="stat",
            width=6,
            height=5,
            line=1,
            queries=(Query("hippo_service_up", "{{service}}"),),
        ),
        Panel(
            title="How has the speedup been, against 1×?",
            text="The dashed line is target-only decoding.",
            unit=TIMES,
            width=12,
            line=1,
            least=0,
            queries=(Query(SPEEDUP, "decode"), Query(END_TO_END, "end to end")),
        ),
        Panel(
            title="How fast is each policy?",
            text="Decode speedup by the policy that answered; off is target-only decoding itself "
            "and shows how far the baseline is off.",
            unit=TIMES,
            width=12,
            line=1,
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_decode_baseline_seconds_total', by='policy')} / "
                    f"({rate('hippo_decode_seconds_total', by='policy')} > 0)",
                    "{{policy}}",
                ),
            ),
        ),
        Panel(
            title="How long does the first token take?",
            text="From the request's arrival: media, the queue and the target's prefill.",
            unit="s",
            queries=quantiles("vllm:time_to_first_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="How long does each further token take?",
            text="Mean over one answer; quantiles over answers.",
            unit="s",
            queries=quantiles("vllm:request_time_per_output_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="How long does a reader wait for the next piece?",
            text="Between two verdicts, each of one token or several.",
            unit="s",
            queries=quantiles("vllm:inter_token_latency_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="How many requests run, how many wait?",
            text="Running: with a slot of the target. Waiting: the prompt is read, or no slot is "
            "free.",
            unit="short",
            least=0,
            queries=(
                Query("sum(vllm:num_requests_running)", "running"),
                Query("sum(vllm:num_requests_waiting)", "waiting"),
            ),
        ),
        Panel(
            title="How do answers end?",
            text="stop: an end token or stop string; length: the token limit; abort: the client "
            "went away; error: anything else.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(rate("vllm:request_success_total", by="finished_reason"),
                      "{{finished_reason}}"),
            ),
        ),
        Panel(
            title="Which HTTP statuses are answered?",
            text="429: slots and queue are full. 503: the target is down. 499: the client went "
            "away before the answer began.",
            unit="reqps",
            queries=(
                Query(
                    rate('hippo_http_requests_total{path=~"/v1/.*"}', by="status"), "{{status}}"
                ),
            ),
        ),
        Panel(
            title="How many tokens are read and written?",
            text="Prompt tokens, visual ones included, and completion tokens; counted when an "
            "answer ends.",
            unit="short",
            width=12,
            queries=(
                Query(rate("vllm:prompt_tokens_total"), "prompt tokens/s"),
                Query(rate("vllm:generation_tokens_total"), "completion tokens/s"),
            ),
        ),
        Panel(
            title="How many tokens does one forward of the target settle?",
            text="1 + accepted / forwards. Target-only decoding settles 1.",
            unit="short",
            width=12,
            line=1,
            least=0,
            queries=(
                Query(f"1 + {ACCEPTED} / {rate('hippo_target_forwards_total')}", "tokens/forward"),
            ),
        ),
    ),
)  # fmt: skip
