"""``hippo doctor``: reads a running gateway's metrics and reports what is wrong with the pair.

The bounds equal the alerts' bounds (deploy/prometheus/rules/hippo.yml; a test compares them).
Two rules come from HIPPO (https://arxiv.org/abs/2601.08273): fewer than 3 mean accepted tokens, a
mean run length under 4, mean that draft and target are badly aligned; a high acceptance rate with a
speedup under 1.5 means that scheduling or transport is the problem.
"""

import argparse
import enum
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from hippo.errors import InvalidRequestError, UnavailableError

HELP = "read a running gateway's figures and say what is wrong"
DESCRIPTION = (
    "Reads /metrics of a running gateway and says how fast the pair is, whether "
    "anything is wrong, which failure it is, and what to do."
)
EXAMPLES = """\
examples:
  hippo doctor http://127.0.0.1:8000                 all since the gateway started
  hippo doctor http://127.0.0.1:8000 --seconds 60    what happens in the next minute alone

exit code: 0 all is well, 1 something is wrong or nobody answers, 3 too little traffic to judge.
"""
LEAST_SPEEDUP = 1.0
LEAST_ACCEPTANCE = 0.3
LEAST_RUN_LENGTH = 4.0
HIGH_ACCEPTANCE = 0.8
SPEEDUP_OF_HIGH_ACCEPTANCE = 1.5
MOST_STALE_BLOCKS = 0.3
MOST_FAILED_REQUESTS = 0.05
MOST_DRAFT_LOSSES = 0.05  # per request
_LEAST_DRAFT_TOKENS = 50  # verified draft tokens needed to judge the acceptance rate
_LEAST_DECODE_S = 0.2  # decode time with a draft needed to judge the speedup

Labels = tuple[tuple[str, str], ...]


class Severity(enum.Enum):
    """How serious a finding is, in ascending order: exit code, mark and style."""

    GOOD = (0, "ok", "green")
    UNKNOWN = (3, "??", "yellow")
    PROBLEM = (1, "!!", "red")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the gateway's address")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="watch for S seconds (default: all since the start of the gateway)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise InvalidRequestError("--seconds must be above 0")
    with httpx.Client(base_url=arguments.url.rstrip("/"), trust_env=False, timeout=10) as client:
        readings = _fetch(client)
        if arguments.seconds is not None:
            with Console(stderr=True).status(f"watching for {arguments.seconds:g} s ..."):
                time.sleep(arguments.seconds)
            readings = _fetch(client).since(readings)
    findings, console = diagnose(readings), Console()
    for finding in findings:
        _, mark, style = finding.severity.value
        console.print(f"{mark} ", style=f"bold {style}", end="")
        console.print(finding.text, highlight=False, markup=False)
        if finding.advice:
            console.print(f"   {finding.advice}", style="dim", highlight=False, markup=False)
    exit_code, *_ = max((each.severity for each in findings), key=list(Severity).index).value
    return exit_code


def _fetch(client: httpx.Client) -> "Readings":
    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise UnavailableError(f"no gateway answers at {client.base_url} ({error})") from None
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"{client.base_url} is no address: {error}") from None
    try:
        return parse_scrape(response.raise_for_status().text)
    except (httpx.HTTPStatusError, ValueError):
        raise UnavailableError(
            f"{client.base_url}/metrics is not a hippo gateway's; give the gateway's address"
        ) from None


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion from the metrics, with advice."""

    severity: Severity
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """The values of all series of a scrape, by name and labels."""

    values: Mapping[tuple[str, Labels], float]

    def since(self, earlier: "Readings") -> "Readings":
        """Returns the growth of the counters since ``earlier``, with the gauges unchanged."""
        grown = {
            key: value - earlier.values.get(key, 0.0)
            for key, value in self.values.items()
            if key[0].endswith(("_total", "_sum", "_count", "_bucket"))
        }
        return Readings({**self.values, **grown})

    def matching(self, name: str, **labels: str) -> list[float]:
        """Returns the values of the series with these labels; the value "!x" means any but "x"."""

        def fits(own: Labels) -> bool:
            found = dict(own)
            return all(
                found.get(label) != value[1:] if value[0] == "!" else found.get(label) == value
                for label, value in labels.items()
            )

        return [v for (series, own), v in self.values.items() if series == name and fits(own)]

    def total(self, name: str, **labels: str) -> float:
        return sum(self.matching(name, **labels))

    def share(self, part: str, whole: str, **labels: str) -> float:
        """Returns the total of ``part`` over the total of ``whole``; 0 without any."""
        return self.total(part, **labels) / (self.total(whole, **labels) or math.inf)

    def histogram_mean(self, name: str) -> float:
        """Returns the mean of a histogram; 0 without observations."""
        return self.share(f"{name}_sum", f"{name}_count")


def parse_scrape(text: str) -> Readings:
    """Parses the text of /metrics. Raises ValueError if it is not from a gateway."""
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    readings = Readings(values)
    if not readings.matching("hippo_service_up"):
        raise ValueError("not a gateway's metrics")
    return readings


def diagnose(readings: Readings) -> list[Finding]:
    """Returns at least one finding: the services first, then speed, draft and requests."""
    speedup, decode_s = None, "hippo_decode_seconds_total"
    if readings.total(decode_s, policy="!off") >= _LEAST_DECODE_S:
        speedup = readings.share("hippo_decode_baseline_seconds_total", decode_s, policy="!off")
    return [
        *(list(_services(readings)) or [Finding(Severity.GOOD, "draft and target serve")]),
        _about_speed(readings, speedup),
        *_about_draft(readings, speedup),
        *_about_requests(readings),
    ]


def _services(readings: Readings) -> Iterator[Finding]:
    if not readings.total("hippo_service_up", service="target"):
        yield _problem(
            "the target does not serve: no question is answered",
            "see its log and its health check; it may still be loading",
        )
    if not readings.matching("hippo_service_up", service="draft"):
        yield _problem(
            "no draft is configured: every answer is target-only",
            "start the gateway with --draft HOST:PORT",
        )
    elif not readings.total("hippo_service_up", service="draft"):
        yield _problem(
            "the draft does not serve or does not fit the target: answers are target-only",
            "GET /ready says which (draft_problem)",
        )


def _about_speed(readings: Readings, speedup: float | None) -> Finding:
    if speedup is None:
        if not readings.matching("hippo_baseline_step_seconds"):
            return Finding(
                Severity.UNKNOWN,
                "the speedup is not known: no target-only step was measured yet",
                "ask a few questions; --calibration-share above 0 runs the first one target-only",
            )
        return Finding(Severity.UNKNOWN, "too little was decoded with a draft to tell the speedup")
    text = f"decoding is {speedup:.2f} times as fast as the target alone"
    if speedup >= LEAST_SPEEDUP:
        return Finding(Severity.GOOD, text)
    return _problem(
        text + ": speculation costs time",
        "the policy adaptive stops drafting where it does not pay; --policy off does without",
    )


def _about_draft(readings: Readings, speedup: float | None) -> Iterator[Finding]:
    verified = "vllm:spec_decode_num_draft_tokens_total"
    if readings.total(verified) < _LEAST_DRAFT_TOKENS:
        yield Finding(Severity.UNKNOWN, "too few draft tokens were verified to judge the draft")
        return
    acceptance = readings.share("vllm:spec_decode_num_accepted_tokens_total", verified)
    run_length = readings.histogram_mean("hippo_run_length_tokens")
    text = f"{acceptance:.0%} of the draft's tokens are accepted, mean run length {run_length:.1f}"
    is_slow = speedup is not None and speedup < SPEEDUP_OF_HIGH_ACCEPTANCE
    if run_length < LEAST_RUN_LENGTH:
        yield _problem(
            f"draft and target are badly aligned: {text}",
            "check that both are of one family and generation, prune less "
            "(speculative.pruning.ratio), or take another draft",
        )
    elif acceptance < LEAST_ACCEPTANCE:
        yield _problem(
            f"acceptance has collapsed: {text}",
            "was a checkpoint changed? compare pruning strategies and shorter blocks",
        )
    elif acceptance > HIGH_ACCEPTANCE and is_slow:
        yield _scheduling(readings, text)
    else:
        yield Finding(Severity.GOOD, text)
    stale = readings.share("hippo_stale_blocks_total", "hippo_blocks_total")
    if stale > MOST_STALE_BLOCKS:
        yield _problem(
            f"{stale:.0%} of the draft's blocks come too late",
            "the draft is often wrong, or far away: look at acceptance, then at the network",
        )


def _scheduling(readings: Readings, text: str) -> Finding:
    """Names the largest loss of time behind a high acceptance rate with a low speedup."""
    transport = readings.histogram_mean("hippo_round_transport_seconds")
    forwards = readings.total("hippo_target_forwards_total")
    decode_s = readings.total("vllm:request_decode_time_seconds_sum") or 1.0
    wait_s = readings.total("hippo_sequence_wait_seconds_total", side="target")
    shares = {
        "the target waits for the draft": wait_s / decode_s,
        "transport between the services": transport * forwards / decode_s,
    }
    cause, share = max(shares.items(), key=lambda item: item[1])
    return _problem(
        f"scheduling or transport eats the gain: {text}, but little is gained; most goes to: "
        f"{cause} ({share:.0%} of the decoding time)",
        "give draft, gateway and target their own device or core, and keep them on one machine or "
        "a fast network; a draft nearly as slow as the target gains nothing either",
    )


def _about_requests(readings: Readings) -> Iterator[Finding]:
    num_ended = readings.total("vllm:request_success_total")
    num_failed = readings.total("vllm:request_success_total", finished_reason="error")
    if num_failed > MOST_FAILED_REQUESTS * num_ended:
        num_refused = readings.total("hippo_http_requests_total", status="429")
        yield _problem(
            f"{num_failed:.0f} of {num_ended:.0f} requests failed, {num_refused:.0f} of them "
            "refused because slots and queue were full",
            "raise --slots or --max-queue of the target, or add a replica"
            if num_refused > num_failed / 2
            else "the gateway's log names each by its request id",
        )
    losses = "hippo_draft_losses_total"
    if readings.total(losses) > MOST_DRAFT_LOSSES * num_ended:
        told = ", ".join(
            f"{dict(labels)['cause']} {num:.0f}"
            for (name, labels), num in sorted(readings.values.items())
            if name == losses and num
        )
        yield _problem(
            f"answers went on without their draft ({told}; {num_ended:.0f} requests)",
            "overloaded: raise --slots of the draft; no_room: raise its --cache-tokens; "
            "unavailable, stalled: see its log",
        )


def _problem(text: str, advice: str) -> Finding:
    return Finding(Severity.PROBLEM, text, advice)
