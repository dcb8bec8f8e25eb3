"""What the gateway says of itself and of speculation, besides vLLM's names."""

from __future__ import annotations

import enum

from hippo.metrics.buckets import (
    DELAY_SECONDS,
    RUN_TOKENS,
    SPEEDUP_RATIOS,
    TRANSPORT_SECONDS,
)
from hippo.metrics.spec import Kind, Label, Metric
from hippo.speculation.policies import POLICY_NAMES
from hippo.types import PruningStrategy

OUTCOMES = ("stop", "length", "cancelled", "error")
MODES = ("optimistic", "conservative", "target_only")
SIDES = ("draft", "target")


class Waste(enum.Enum):
    """Why a draft token was of no use."""

    REJECTED = "rejected"  # the target's token there is another
    BEHIND_REJECTION = "behind_rejection"  # it followed a rejected one
    STALE = "stale"  # of a run that had ended when it came
    SETTLED_FIRST = "settled_first"  # right, but the target had come to it by itself
    UNVERIFIED = "unverified"  # the answer was over before its turn


class DraftLoss(enum.Enum):
    """Why an answer went on without its draft."""

    OVERLOADED = "overloaded"  # no free slot
    UNAVAILABLE = "unavailable"  # the service, or the way to it, is gone
    STALLED = "stalled"  # it owed tokens for longer than --draft-stall-s
    INCOMPATIBLE = "incompatible"  # it read another prompt
    ERROR = "error"  # anything else


POLICY = Label("policy", POLICY_NAMES)
TARGET = Label("target", bound="addresses of the targets")

HTTP_REQUESTS = Metric(
    "hippo_http_requests",
    Kind.COUNTER,
    "HTTP requests answered; status 499 is a client that went away before the answer began.",
    (Label("path", bound="the routes, and `unknown`"), Label("status", bound="HTTP statuses")),
)
COMPLETIONS = Metric(
    "hippo_completions",
    Kind.COUNTER,
    "Completions ended.",
    (POLICY, Label("outcome", OUTCOMES)),
)
CALIBRATIONS = Metric(
    "hippo_calibrations",
    Kind.COUNTER,
    "Completions run target-only to measure the baseline (`--calibration-share`).",
)
DECODE_TIME = Metric(
    "hippo_decode_seconds",
    Kind.COUNTER,
    "From the first token to the last, of answers for which a baseline was known.",
    (POLICY,),
)
DECODE_BASELINE = Metric(
    "hippo_decode_baseline_seconds",
    Kind.COUNTER,
    "What target-only decoding would have taken for the same tokens of the same answers.",
    (POLICY,),
)
FIRST_TOKEN_TIME = Metric(
    "hippo_first_token_seconds",
    Kind.COUNTER,
    "From arrival to the first token, of the same answers: the part that decoding cannot speed up.",
    (POLICY,),
)
REQUEST_SPEEDUP = Metric(
    "hippo_request_speedup_ratio",
    Kind.HISTOGRAM,
    "Decode speedup of one answer, policy `off` left out.",
    buckets=SPEEDUP_RATIOS,
)
BASELINE_STEP = Metric(
    "hippo_baseline_step_seconds",
    Kind.GAUGE,
    "Target-only time of one token, as measured at contexts of that length.",
    (TARGET, Label("context_tokens_le", bound="11 ranges of context length")),
)
BASELINE_STEPS = Metric(
    "hippo_baseline_steps",
    Kind.COUNTER,
    "Target-only steps that the baseline was learnt from.",
    (TARGET,),
)
BASELINE_AGE = Metric(
    "hippo_baseline_age_seconds",
    Kind.GAUGE,
    "Since the baseline last learnt something.",
    (TARGET,),
)
MODE_TIME = Metric(
    "hippo_mode_seconds",
    Kind.COUNTER,
    "Decoding by mode: the target's forwards and its waits before them.",
    (Label("mode", MODES),),
)
MODE_SWITCHES = Metric(
    "hippo_mode_switches", Kind.COUNTER, "Changes between optimistic and conservative steps."
)
BUSY_TIME = Metric(
    "hippo_sequence_busy_seconds",
    Kind.COUNTER,
    "Device time spent for answers: prefill and steps (the draft's: of the tokens it sent).",
    (Label("side", SIDES),),
)
WAIT_TIME = Metric(
    "hippo_sequence_wait_seconds",
    Kind.COUNTER,
    "Time a side's device had nothing to do while an answer was decoded: it waited for the other.",
    (Label("side", SIDES),),
)
TARGET_FORWARDS = Metric(
    "hippo_target_forwards", Kind.COUNTER, "Forwards of the target after its prefills: rounds."
)
BLOCKS = Metric("hippo_blocks", Kind.COUNTER, "Blocks of draft tokens that came.")
STALE_BLOCKS = Metric(
    "hippo_stale_blocks", Kind.COUNTER, "Blocks of a run that had ended, dropped by the gateway."
)
DRAFTED_TOKENS = Metric(
    "hippo_drafted_tokens", Kind.COUNTER, "Draft tokens that came, verified or not."
)
WASTED_TOKENS = Metric(
    "hippo_wasted_draft_tokens",
    Kind.COUNTER,
    "Draft tokens that came and saved nothing; with those accepted they add up to "
    "`hippo_drafted_tokens_total`.",
    (Label("cause", tuple(cause.value for cause in Waste)),),
)
RUN_LENGTH = Metric(
    "hippo_run_length_tokens",
    Kind.HISTOGRAM,
    "Tokens settled while drafting, from one rejection to the next or to the answer's end.",
    buckets=RUN_TOKENS,
)
FIRST_BLOCK_DELAY = Metric(
    "hippo_first_block_delay_seconds",
    Kind.HISTOGRAM,
    "From the target's first token to the draft's first block; below 0 the draft was ready first.",
    buckets=DELAY_SECONDS,
)
VISUAL_TOKENS = Metric(
    "hippo_visual_tokens",
    Kind.COUNTER,
    "Visual tokens of videos, by whether the draft saw them.",
    (
        Label("strategy", tuple(strategy.value for strategy in PruningStrategy)),
        Label("fate", ("kept", "pruned")),
    ),
)
ROUND_TRANSPORT = Metric(
    "hippo_round_transport_seconds",
    Kind.HISTOGRAM,
    "Time of a round in which the target's device neither worked nor waited for the draft; mean "
    "of one answer's rounds.",
    buckets=TRANSPORT_SECONDS,
)
DRAFT_LOSSES = Metric(
    "hippo_draft_losses",
    Kind.COUNTER,
    "Times an answer went on without its draft.",
    (Label("cause", tuple(cause.value for cause in DraftLoss)),),
)
DRAFT_RECOVERIES = Metric(
    "hippo_draft_recoveries", Kind.COUNTER, "Times a draft joined an answer under way."
)
SERVICE_UP = Metric(
    "hippo_service_up",
    Kind.GAUGE,
    "1 while one such service is usable; none for a draft that is not configured.",
    (Label("service", SIDES),),
)
SERVICES_READY = Metric(
    "hippo_services_ready",
    Kind.GAUGE,
    "Services of that kind that answer, of those that the gateway was given.",
    (Label("service", SIDES),),
)
BUILD_INFO = Metric(
    "hippo_build_info",
    Kind.GAUGE,
    "1, with the versions of the software and of the protocol between gateway and services.",
    (Label("version", bound="one"), Label("protocol_version", bound="one")),
)

GATEWAY_METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
