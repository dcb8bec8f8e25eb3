"""The metrics that draft and target service each export of their own device."""

from hippo.metrics.spec import Label, Metric, counter, gauge, histogram

# Upper bounds of histogram buckets.
FORWARD_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip

SLOTS = gauge("hippo_slots", "Cache slots.")
SLOTS_USED = gauge("hippo_slots_used", "Cache slots in use.")
QUEUE_LENGTH = gauge("hippo_queue_length", "Sequences that wait for a slot.")
QUEUE_CAPACITY = gauge(
    "hippo_queue_capacity", "Most sequences that may wait for a slot (`--max-queue`; the draft: 0)."
)
STREAMS = gauge("hippo_streams", "Open streams.")
SEQUENCES = counter("hippo_sequences", "Sequences begun.")
SEQUENCE_FAILURES = counter("hippo_sequence_failures", "Sequences ended by an internal error.")
PREFILLS = counter("hippo_prefills", "Prefills finished.")
PREFIX_HITS = counter(
    "hippo_prefix_cache_hits", "Prefills that reused the beginning of their prompt from a slot."
)
PREFIX_MISSES = counter("hippo_prefix_cache_misses", "Prefills from the first token.")
PREFILL_ROWS = counter(
    "hippo_prefill_tokens",
    "Prompt tokens of all prefills, with reused tokens and, in the draft, without pruned tokens.",
)
REUSED_ROWS = counter(
    "hippo_prefill_cached_tokens", "Prompt tokens that prefills reused from a slot."
)
HELPED_PREFILLS = counter(
    "hippo_helped_prefills", "Prefills of which the prefill helper ran a part of the layers."
)
HELPED_ROWS = counter(
    "hippo_helped_prefill_tokens", "Prompt tokens that passed the helper's layers on its device."
)
SAVED_TIME = counter(
    "hippo_helped_prefill_saved_seconds",
    "Time that helped prefills took less than the same tokens in the last prefill without help.",
)
VISION_CACHE_HITS = counter(
    "hippo_vision_cache_hits",
    "Videos and images of prompts whose features were in the vision cache.",
)
VISION_CACHE_MISSES = counter(
    "hippo_vision_cache_misses",
    "Videos and images of prompts that passed through the vision tower.",
)
VISION_CACHE_USED = gauge(
    "hippo_vision_cache_used_bytes", "Size of the vision cache (visual features)."
)
VISION_CACHE_CAPACITY = gauge(
    "hippo_vision_cache_capacity_bytes",
    "Largest size of the vision cache (`--vision-cache-mb`; 0: off).",
)
MEDIA_CACHE_HITS = counter(
    "hippo_media_cache_hits", "Videos and images of requests whose frames were in the media cache."
)
MEDIA_CACHE_MISSES = counter(
    "hippo_media_cache_misses", "Videos and images of requests that were decoded."
)
MEDIA_CACHE_USED = gauge(
    "hippo_media_cache_used_bytes", "Size of the media cache (decoded frames)."
)
MEDIA_CACHE_CAPACITY = gauge(
    "hippo_media_cache_capacity_bytes",
    "Largest size of the media cache (`--media-cache-mb`; 0: off).",
)
ROWS = counter("hippo_rows", "Rows of all decoding forwards.")
FORWARD_SEQUENCES = counter(
    "hippo_forward_sequences",
    "Sequences of all decoding forwards; divided by the forwards, the mean batch size.",
)
PREFILL_TIME = counter("hippo_device_prefill_seconds", "Device time of prefills.")
BUSY_TIME = counter("hippo_device_busy_seconds", "Device time of prefills and forwards.")
IDLE_TIME = counter("hippo_device_idle_seconds", "Time the device thread slept.")
FORWARD_TIME = histogram(
    "hippo_forward_seconds",
    "Device time of one decoding forward, sampling included.",
    FORWARD_SECONDS,
)
MEMORY_USED = gauge(
    "hippo_device_memory_used_bytes",
    "Memory in use on a CUDA device by all processes; on a CPU this process's resident memory.",
)
MEMORY_TOTAL = gauge(
    "hippo_device_memory_total_bytes",
    "Total memory of the device; on a CPU the control group's limit, or the machine's memory.",
)
MODEL_INFO = gauge(
    "hippo_model_info",
    "Always 1; the labels describe the served model.",
    Label("model_name", bound="one"),
    Label("family", bound="one"),
    Label("device", bound="one"),
    Label("dtype", bound="one"),
)

SERVICE_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
