"""What the draft and the target service each say of their own device."""

from __future__ import annotations

from hippo.metrics.buckets import FORWARD_SECONDS
from hippo.metrics.spec import Kind, Label, Metric

SLOTS = Metric("hippo_slots", Kind.GAUGE, "Cache slots.")
SLOTS_USED = Metric("hippo_slots_used", Kind.GAUGE, "Cache slots in use.")
QUEUE_LENGTH = Metric("hippo_queue_length", Kind.GAUGE, "Sequences that wait for a slot.")
QUEUE_CAPACITY = Metric(
    "hippo_queue_capacity", Kind.GAUGE, "Sequences that may wait (`--max-queue`; the draft's is 0)."
)
STREAMS = Metric("hippo_streams", Kind.GAUGE, "Open streams.")
SEQUENCES = Metric("hippo_sequences", Kind.COUNTER, "Sequences begun.")
SEQUENCE_FAILURES = Metric(
    "hippo_sequence_failures", Kind.COUNTER, "Sequences ended by an internal error."
)
PREFILLS = Metric("hippo_prefills", Kind.COUNTER, "Prefills finished.")
PREFIX_HITS = Metric(
    "hippo_prefix_cache_hits",
    Kind.COUNTER,
    "Prefills that found the beginning of their prompt in the slot.",
)
PREFIX_MISSES = Metric(
    "hippo_prefix_cache_misses", Kind.COUNTER, "Prefills that began at the first token."
)
PREFILL_ROWS = Metric(
    "hippo_prefill_tokens",
    Kind.COUNTER,
    "Prompt tokens of all prefills, reused ones included (the draft's: without pruned ones).",
)
REUSED_ROWS = Metric(
    "hippo_prefill_cached_tokens", Kind.COUNTER, "Of these, taken over with the slot."
)
VISION_CACHE_HITS = Metric(
    "hippo_vision_cache_hits",
    Kind.COUNTER,
    "Videos and images of a prompt that the vision tower did not look at again.",
)
VISION_CACHE_MISSES = Metric(
    "hippo_vision_cache_misses",
    Kind.COUNTER,
    "Videos and images of a prompt that passed the vision tower.",
)
VISION_CACHE_USED = Metric(
    "hippo_vision_cache_used_bytes", Kind.GAUGE, "What the vision cache holds."
)
VISION_CACHE_CAPACITY = Metric(
    "hippo_vision_cache_capacity_bytes",
    Kind.GAUGE,
    "What it may hold (`--vision-cache-mb`; 0: it is off).",
)
MEDIA_CACHE_HITS = Metric(
    "hippo_media_cache_hits",
    Kind.COUNTER,
    "Videos and images of a request that were decoded already.",
)
MEDIA_CACHE_MISSES = Metric(
    "hippo_media_cache_misses",
    Kind.COUNTER,
    "Videos and images of a request that were not decoded yet.",
)
MEDIA_CACHE_USED = Metric(
    "hippo_media_cache_used_bytes", Kind.GAUGE, "Frames of earlier media that are kept."
)
MEDIA_CACHE_CAPACITY = Metric(
    "hippo_media_cache_capacity_bytes",
    Kind.GAUGE,
    "What they may take (`--media-cache-mb`; 0: none are kept).",
)
ROWS = Metric("hippo_rows", Kind.COUNTER, "Rows of all decoding forwards.")
FORWARD_SEQUENCES = Metric(
    "hippo_forward_sequences",
    Kind.COUNTER,
    "Sequences of all decoding forwards; over their number: how many share one.",
)
PREFILL_TIME = Metric("hippo_device_prefill_seconds", Kind.COUNTER, "Device time of prefills.")
BUSY_TIME = Metric(
    "hippo_device_busy_seconds", Kind.COUNTER, "Device time of prefills and forwards."
)
IDLE_TIME = Metric("hippo_device_idle_seconds", Kind.COUNTER, "Time the device thread slept.")
FORWARD_TIME = Metric(
    "hippo_forward_seconds",
    Kind.HISTOGRAM,
    "Device time of one decoding forward, sampling included.",
    buckets=FORWARD_SECONDS,
)
MEMORY_USED = Metric(
    "hippo_device_memory_used_bytes",
    Kind.GAUGE,
    "Memory in use on the device, by whomever (CUDA); on a CPU this process's resident memory.",
)
MEMORY_TOTAL = Metric(
    "hippo_device_memory_total_bytes",
    Kind.GAUGE,
    "Memory of the device; on a CPU the limit of the control group, or the machine's.",
)
MODEL_INFO = Metric(
    "hippo_model_info",
    Kind.GAUGE,
    "1, with what is served.",
    (
        Label("model_name", bound="one"),
        Label("family", bound="one"),
        Label("device", bound="one"),
        Label("dtype", bound="one"),
    ),
)

SERVICE_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
