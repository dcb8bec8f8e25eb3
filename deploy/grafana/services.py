"""The processes: device time, memory, queues, slots."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, quantiles, rate

_JOB = '{job=~"hippo-(draft|target)"}'


def _share_of_hits(cache: str, legend: str) -> Query:
    hits, misses = (rate(f"{cache}_{kind}_total", by="job") for kind in ("hits", "misses"))
    return Query(f"{hits} / ({hits} + {misses})", legend)


SERVICES = Dashboard(
    "hippo-services",
    "hippo: services",
    "What the draft's, the target's and the gateway's process have to do, and what with.",
    (
        Panel(
            title="How busy are the devices?",
            text="Share of time in which the device thread computed a prefill or a forward.",
            unit="percentunit",
            least=0,
            most=1,
            queries=(Query(rate("hippo_device_busy_seconds_total", by="job"), "{{job}}"),),
        ),
        Panel(
            title="Is it prefills or forwards that keep them busy?",
            text="Share of time by kind of work. Prefills hold up decoding: many long videos at "
            "once ask for another replica.",
            unit="percentunit",
            stacked=True,
            queries=(
                Query(rate("hippo_device_prefill_seconds_total", by="job"), "{{job}} prefill"),
                Query(rate("hippo_forward_seconds_sum", by="job"), "{{job}} forward"),
            ),
        ),
        Panel(
            title="How long does a forward take?",
            text="Device time of one decoding forward, sampling included.",
            unit="s",
            least=0,
            queries=quantiles("hippo_forward_seconds", 0.5, 0.99, by="job"),
        ),
        Panel(
            title="How many rows does a forward hold?",
            text="Tokens of all sequences that are fed together.",
            unit="short",
            least=0,
            queries=(
                Query(
                    f"{rate('hippo_rows_total', by='job')} / "
                    f"{rate('hippo_forward_seconds_count', by='job')}",
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            title="How much of the prompts was there already?",
            text="Prompt tokens whose keys and values a slot still held, and videos and images "
            "that the vision tower did not look at again or that were decoded already: second "
            "questions and next turns.",
            unit="percentunit",
            least=0,
            most=1,
            queries=(
                Query(
                    f"{rate('hippo_prefill_cached_tokens_total', by='job')} / "
                    f"{rate('hippo_prefill_tokens_total', by='job')}",
                    "{{job}} tokens",
                ),
                _share_of_hits("hippo_vision_cache", "{{job}} vision"),
                _share_of_hits("hippo_media_cache", "{{job}} decoding"),
            ),
        ),
        Panel(
            title="How many slots are taken?",
            text="A slot is one sequence's part of the cache. Without a free slot of the draft an "
            "answer starts target-only.",
            unit="percentunit",
            least=0,
            most=1,
            queries=(
                Query(
                    f"sum by (job) (hippo_slots_used{_JOB}) / sum by (job) (hippo_slots{_JOB})",
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            title="How long is the queue for the target?",
            text="Sequences that wait for a slot, and how many may: above that, status 429.",
            unit="short",
            least=0,
            queries=(
                Query('hippo_queue_length{job="hippo-target"}', "waiting"),
                Query('hippo_queue_capacity{job="hippo-target"}', "places"),
            ),
        ),
        Panel(
            title="How full is the devices' memory?",
            text="On a GPU all that is in use there; on a CPU the process's resident memory, of "
            "what it may have.",
            unit="percentunit",
            least=0,
            most=1,
            queries=(
                Query(
                    "max by (job) (hippo_device_memory_used_bytes) / "
                    "max by (job) (hippo_device_memory_total_bytes)",
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            title="How much memory does each process hold?",
            text="Resident memory in the host.",
            unit="bytes",
            least=0,
            queries=(
                Query('process_resident_memory_bytes{job=~"hippo-.*"}', "{{job}}"),
            ),
        ),
        Panel(
            title="How many processor cores does each process use?",
            text="A gateway near one core is at its limit: it is one event loop.",
            unit="short",
            least=0,
            queries=(
                Query(rate('process_cpu_seconds_total{job=~"hippo-.*"}', by="job"), "{{job}}"),
            ),
        ),
        Panel(
            title="How many sequences begin?",
            text="On each service; the draft has fewer while it is down or full.",
            unit="reqps",
            least=0,
            queries=(Query(rate("hippo_sequences_total", by="job"), "{{job}}"),),
        ),
        Panel(
            title="How many sequences fail inside a service?",
            text="Internal errors; the service's log has each with its traceback.",
            unit="reqps",
            least=0,
            queries=(Query(rate("hippo_sequence_failures_total", by="job"), "{{job}}"),),
        ),
        Panel(
            title="Which processes answer Prometheus?",
            text="1 while the scrape succeeds.",
            unit="none",
            kind="stat",
            line=1,
            queries=(Query('up{job=~"hippo-.*"}', "{{job}}"),),
        ),
    ),
)  # fmt: skip
