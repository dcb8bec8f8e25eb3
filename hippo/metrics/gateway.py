"""The gateway's metrics of itself and of speculation that vLLM does not have."""

import enum

from hippo.metrics.spec import Label, Metric, counter, gauge, histogram
from hippo.speculation.policies import POLICY_NAMES
from hippo.types import PruningStrategy

OUTCOMES = ("stop", "length", "cancelled", "error")
MODES = ("optimistic", "conservative", "target_only")
SIDES = ("draft", "target")


class Waste(enum.Enum):
    """Why a draft token saved nothing."""

    REJECTED = "rejected"  # differs from the target's token
    BEHIND_REJECTION = "behind_rejection"  # it followed a rejected one
    STALE = "stale"  # its run ended before it arrived
    SETTLED_FIRST = "settled_first"  # right, but the target generated it first
    UNVERIFIED = "unverified"  # the answer ended first


class DraftLoss(enum.Enum):
    """Why an answer continued without its draft."""

    OVERLOADED = "overloaded"  # no free slot
    UNAVAILABLE = "unavailable"  # the service or the connection failed
    STALLED = "stalled"  # it owed tokens for longer than --draft-stall-s
    INCOMPATIBLE = "incompatible"  # its prompt differs from the target's
    NO_ROOM = "no_room"  # its slot has no room for the pruned prompt, or for more of the answer
    ERROR = "error"  # anything else


POLICY = Label("policy", POLICY_NAMES)
TARGET = Label("target", bound="addresses of the targets")

# Upper bounds of histogram buckets; a delay is negative if the draft was ready first.
DELAY_SECONDS = (
    -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, -0.005, -0.002, 0.0,
    0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
RUN_TOKENS = (
    1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0,
    192.0, 256.0, 512.0, 1024.0,
)  # fmt: skip
SPEEDUP_RATIOS = (
    0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0,
    10.0, 12.0, 15.0, 20.0,
)  # fmt: skip
TRANSPORT_SECONDS = (
    0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015,
    0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1,
)  # fmt: skip

HTTP_REQUESTS = counter(
    "hippo_http_requests",
    "HTTP requests answered. Status 499: the client disconnected before the answer began.",
    Label("path", bound="the routes, and `unknown`"),
    Label("status", bound="HTTP statuses"),
)
COMPLETIONS = counter("hippo_completions", "Completions ended.", POLICY, Label("outcome", OUTCOMES))
CALIBRATIONS = counter(
    "hippo_calibrations",
    "Completions run target-only to measure the baseline (`--calibration-share`).",
)
DECODE_TIME = counter(
    "hippo_decode_seconds",
    "Time from the first token to the last, of answers with a known baseline.",
    POLICY,
)
DECODE_BASELINE = counter(
    "hippo_decode_baseline_seconds",
    "Estimated target-only decode time of the answers in `hippo_decode_seconds_total`.",
    POLICY,
)
FIRST_TOKEN_TIME = counter(
    "hippo_first_token_seconds",
    "Time from arrival to the first token, of the answers in `hippo_decode_seconds_total`.",
    POLICY,
)
REQUEST_SPEEDUP = histogram(
    "hippo_request_speedup_ratio",
    "Decode speedup of each answer, without those under policy `off`.",
    SPEEDUP_RATIOS,
)
BASELINE_STEP = gauge(
    "hippo_baseline_step_seconds",
    "Measured target-only time per token, by context length.",
    TARGET,
    Label("context_tokens_le", bound="11 ranges of context length"),
)
BASELINE_STEPS = counter(
    "hippo_baseline_steps", "Target-only steps measured for the baseline.", TARGET
)
BASELINE_AGE = gauge(
    "hippo_baseline_age_seconds", "Time since the last measured step of the baseline.", TARGET
)
MODE_TIME = counter(
    "hippo_mode_seconds",
    "Decode time by mode: the target's forwards and its waits before them.",
    Label("mode", MODES),
)
MODE_SWITCHES = counter("hippo_mode_switches", "Changes between optimistic and conservative steps.")
BUSY_TIME = counter(
    "hippo_sequence_busy_seconds",
    "Device time of prefills and steps; the draft's steps count only for tokens that it sent.",
    Label("side", SIDES),
)
WAIT_TIME = counter(
    "hippo_sequence_wait_seconds",
    "Time in which a side's device waited for the other side while an answer was decoded.",
    Label("side", SIDES),
)
TARGET_FORWARDS = counter(
    "hippo_target_forwards", "Target forwards after prefills, which is the number of rounds."
)
BLOCKS = counter("hippo_blocks", "Blocks of draft tokens received.")
STALE_BLOCKS = counter(
    "hippo_stale_blocks", "Blocks dropped by the gateway, because their run had ended."
)
DRAFTED_TOKENS = counter(
    "hippo_drafted_tokens", "Draft tokens received, verified or not, on branches too."
)
WASTED_TOKENS = counter(
    "hippo_wasted_draft_tokens",
    "Draft tokens received that saved nothing. They, the accepted tokens and the accepted reused "
    "tokens add up to `hippo_drafted_tokens_total`.",
    Label("cause", tuple(cause.value for cause in Waste)),
)
REUSED_TOKENS = counter(
    "hippo_reused_draft_tokens",
    "Draft tokens behind a rejected one that the target verified instead of waiting. Those that "
    "were accepted are not among vLLM's accepted tokens.",
    Label("outcome", ("accepted", "rejected")),
)
RUN_LENGTH = histogram(
    "hippo_run_length_tokens",
    "Tokens settled while drafting, from one rejection to the next, the corrected token included, "
    "or to the answer's end.",
    RUN_TOKENS,
)
FIRST_BLOCK_DELAY = histogram(
    "hippo_first_block_delay_seconds",
    "Time from the target's first token to the draft's first block; below 0 the block was first.",
    DELAY_SECONDS,
)
VISUAL_TOKENS = counter(
    "hippo_visual_tokens",
    "Visual tokens of videos, by whether the draft saw them.",
    Label("strategy", tuple(strategy.value for strategy in PruningStrategy)),
    Label("fate", ("kept", "pruned")),
)
ROUND_TRANSPORT = histogram(
    "hippo_round_transport_seconds",
    "Time of a round in which the target's device neither worked nor waited for the draft; the "
    "mean of each answer's rounds.",
    TRANSPORT_SECONDS,
)
DRAFT_LOSSES = counter(
    "hippo_draft_losses",
    "Times an answer continued without its draft.",
    Label("cause", tuple(cause.value for cause in DraftLoss)),
)
DRAFT_RECOVERIES = counter("hippo_draft_recoveries", "Times a draft joined an answer in progress.")
SERVICE_UP = gauge(
    "hippo_service_up",
    "1 while at least one service of this kind is usable, else 0; absent without a draft.",
    Label("service", SIDES),
)
SERVICES_READY = gauge(
    "hippo_services_ready", "Configured services of this kind that answer.", Label("service", SIDES)
)
BUILD_INFO = gauge(
    "hippo_build_info",
    "Always 1; the labels are the versions of the software and of the gRPC protocol.",
    Label("version", bound="one"),
    Label("protocol_version", bound="one"),
)

GATEWAY_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
