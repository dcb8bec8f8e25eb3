"""Speculation in depth: what is accepted, what is wasted, and who waits for whom."""

from __future__ import annotations

from deploy.grafana.overview import TIMES
from deploy.grafana.panels import WINDOW, Dashboard, Panel, Query, quantiles, rate

_DECODE = rate("vllm:request_decode_time_seconds_sum")
_KEPT = 'hippo_visual_tokens_total{fate="kept"}'
_DRAFTED = rate("hippo_drafted_tokens_total")

SPECULATION = Dashboard(
    "hippo-speculation",
    "hippo: speculation in depth",
    "Why the pair is as fast as it is.",
    (
        Panel(
            title="At which position are draft tokens still accepted?",
            text="Share of the forwards with draft tokens in which the token at that position was "
            "accepted. A steep fall means that shorter blocks would waste less.",
            unit="percentunit",
            kind="bargauge",
            least=0,
            most=1,
            is_instant=True,
            queries=(
                Query(
                    f"{rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', by='position')}"
                    " / on() group_left() "
                    f"{rate('vllm:spec_decode_num_drafts_total')}",
                    "{{position}}",
                ),
            ),
        ),
        Panel(
            title="Is the gain shared by all answers?",
            text="Quantiles of the decode speedup over answers. A low p10 beside a good median: "
            "some questions do not suit the draft.",
            unit=TIMES,
            line=1,
            least=0,
            queries=quantiles("hippo_request_speedup_ratio", 0.1, 0.5, 0.9),
        ),
        Panel(
            title="How many tokens pass from one rejection to the next?",
            text="Mean and median run length. Below 3 draft and target are badly aligned: another "
            "draft, less pruning, or the right pair of checkpoints.",
            unit="short",
            line=3,
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_run_length_tokens_sum')} / "
                    f"{rate('hippo_run_length_tokens_count')}",
                    "mean",
                ),
                *quantiles("hippo_run_length_tokens", 0.5),
            ),
        ),
        Panel(
            title="In which mode is the time spent?",
            text="Optimistic: blocks of the run are verified while the next one is drafted. "
            "Conservative: after a rejection. Target-only: forwards without draft tokens.",
            unit="percentunit",
            stacked=True,
            most=1,
            queries=(
                Query(
                    f"{rate('hippo_mode_seconds_total', by='mode')} / on() group_left() "
                    f"{rate('hippo_mode_seconds_total')}",
                    "{{mode}}",
                ),
            ),
        ),
        Panel(
            title="How often does the mode change?",
            text="Switches per forward of the target.",
            unit="percentunit",
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_mode_switches_total')} / {rate('hippo_target_forwards_total')}",
                    "switches/forward",
                ),
            ),
        ),
        Panel(
            title="What becomes of the draft's tokens?",
            text="Share of the tokens that came. rejected: another token is the target's; "
            "behind_rejection: followed a rejected one; stale: of a run that had ended; "
            "settled_first: right, but the target had come to it by itself; unverified: the "
            "answer was over.",
            unit="percentunit",
            stacked=True,
            most=1,
            queries=(
                Query(
                    f"{rate('vllm:spec_decode_num_accepted_tokens_total')} / {_DRAFTED}", "accepted"
                ),
                Query(
                    f"{rate('hippo_wasted_draft_tokens_total', by='cause')} / on() group_left() "
                    f"{_DRAFTED}",
                    "{{cause}}",
                ),
            ),
        ),
        Panel(
            title="Who waits for whom?",
            text="Share of the decoding time in which a side's device had nothing to do. The "
            "target waits: the draft is too slow or wrong. The draft waits: it is far ahead.",
            unit="percentunit",
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_sequence_wait_seconds_total', by='side')} / on() group_left() "
                    f"{_DECODE}",
                    "{{side}} waits",
                ),
            ),
        ),
        Panel(
            title="How much do both sides work at once?",
            text="Device time of each side per second of an answer's whole time. The sum is above "
            "100 % as far as they overlap.",
            unit="percentunit",
            stacked=True,
            queries=(
                Query(
                    f"{rate('hippo_sequence_busy_seconds_total', by='side')} / on() group_left() "
                    f"({_DECODE} + {rate('vllm:request_prefill_time_seconds_sum')})",
                    "{{side}} works",
                ),
            ),
        ),
        Panel(
            title="Is the draft ready when the target's first token is?",
            text="From the target's first token to the draft's first block. Below 0 the draft's "
            "prefill was hidden behind the target's.",
            unit="s",
            queries=quantiles("hippo_first_block_delay_seconds", 0.1, 0.5, 0.9),
        ),
        Panel(
            title="How much of the video does the draft see?",
            text="Kept over all visual tokens, by pruning strategy.",
            unit="percentunit",
            least=0,
            most=1,
            queries=(
                Query(
                    f"{rate(_KEPT, by='strategy')} / "
                    f"({rate('hippo_visual_tokens_total', by='strategy')} > 0)",
                    "{{strategy}}",
                ),
            ),
        ),
        Panel(
            title="What does the way between the services cost a round?",
            text="Time of a round in which the target's device neither worked nor waited for the "
            "draft: messages, the gateway, and the target's own loop.",
            unit="s",
            queries=quantiles("hippo_round_transport_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="How many blocks come too late?",
            text="Blocks of a run that had ended by the time they reached the gateway.",
            unit="percentunit",
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_stale_blocks_total')} / {rate('hippo_blocks_total')}", "stale"
                ),
            ),
        ),
        Panel(
            title="How often is the draft lost, and why?",
            text="Answers that went on without it, within the window; and drafts that joined an "
            "answer under way.",
            unit="short",
            least=0,
            queries=(
                Query(f"sum by (cause) (increase(hippo_draft_losses_total[{WINDOW}]))",
                      "{{cause}}"),
                Query(f"sum(increase(hippo_draft_recoveries_total[{WINDOW}]))", "joined again"),
            ),
        ),
        Panel(
            title="What is the speedup measured against?",
            text="Target-only time of one token by context length, as it was measured.",
            unit="s",
            least=0,
            queries=(
                Query("max by (context_tokens_le) (hippo_baseline_step_seconds)",
                      "up to {{context_tokens_le}} tokens"),
            ),
        ),
        Panel(
            title="How fresh is that baseline?",
            text="Since it last learnt from target-only steps; a share of the requests is run "
            "target-only for it (--calibration-share).",
            unit="s",
            least=0,
            queries=(Query("max(hippo_baseline_age_seconds)", "age"),),
        ),
        Panel(
            title="How many requests are spent on the baseline?",
            text="Requests run target-only to measure it, of all that ended.",
            unit="percentunit",
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_calibrations_total')} / {rate('hippo_completions_total')}",
                    "calibrations",
                ),
            ),
        ),
    ),
)  # fmt: skip
