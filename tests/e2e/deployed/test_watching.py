"""A real Prometheus watches the pair: panels, rules and alerts, in health and with faults."""

import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from hippo.cli.processes import Child
from tests.e2e.support import (
    CHAT,
    Door,
    Running,
    chat_body,
    data_url,
    free_port,
    further_gateway,
    hippo,
    process,
    readiness,
    streamed,
    wait_until,
)
from tests.support.models.random_draft import write_random_draft
from tests.support.watching.dashboards import PANEL_WINDOW, PANELS
from tests.support.watching.prometheus import BINARY, WINDOW, Prometheus, hurried_rules, prometheus

NUM_TOKENS = 24  # of an answer, if a test says nothing else


@dataclass(slots=True)
class Watched:
    """A gateway of its own before the running services, and the Prometheus that watches all."""

    running: Running
    door: Door
    prometheus: Prometheus
    answers: list[dict[str, Any]] = field(default_factory=list)  # their `hippo` objects

    def body(self, num_tokens: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
        return chat_body(data_url(self.running.clip), num_tokens, **fields)

    def ask(self, client: httpx.Client, **fields: Any) -> dict[str, Any]:
        response = client.post(CHAT, json=self.body(**fields))
        figures: dict[str, Any] = response.raise_for_status().json()["hippo"]
        self.answers.append(figures)
        return figures

    def panel(self, title: str, **labels: str) -> float:
        """What the first query of a panel shows for these labels now; NaN for nothing."""
        (panel,) = [panel for panel in PANELS if panel.title == title]
        return self.prometheus.value(panel.exprs[0].replace(PANEL_WINDOW, WINDOW), **labels)

    @contextmanager
    def traffic(self, **speculative: Any) -> Iterator[None]:
        """Questions one after another, of a few kinds or as said; every second one reuses nothing
        that is cached, so that something is left to compute. With pauses: each window of the
        rules needs some of them, and no more."""
        kinds: list[dict[str, Any]] = [speculative] if speculative else [
            {"pruning": {"strategy": "uniform", "ratio": 0.5}},
            {"policy": "vpsd", "gamma": 4},
            {},
        ]  # fmt: skip
        leave = threading.Event()

        def work() -> None:
            with self.door.client() as client:
                while not leave.wait(0.5):
                    for kind in kinds:
                        self.ask(client, speculative=kind)
                        self.ask(client, speculative=kind, cache_salt=uuid.uuid4().hex)
                    client.post(CHAT, json={"model": "unknown", "messages": []})

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            try:
                yield
            finally:
                leave.set()
        done.result()

    def is_ready(self) -> bool:
        """Whether the draft is loaded, and the gateway knows it."""
        ready = readiness(self.door.url)
        is_known = ready is not None and ready["draft"] == "ready"
        return is_known and self.running.metric("draft", "hippo_slots") == 2


pytestmark = pytest.mark.skipif(
    BINARY is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)

SHARE = 0.2  # of requests run target-only


@pytest.fixture(scope="module")
def watched(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Started before the first of these tests and stopped after the last."""
    folder = tmp_path_factory.mktemp("prometheus")
    with further_gateway(running, "--calibration-share", str(SHARE)) as door:
        targets = {"hippo-gateway": door.url.removeprefix("http://")} | {
            f"hippo-{service}": f"127.0.0.1:{metrics_port}"
            for service, metrics_port in running.metrics_ports.items()
        }
        with prometheus(folder, free_port(), targets) as server:
            watched = Watched(running, door, server)
            wait_until(watched.is_ready)
            yield watched


def _panel_expressions() -> list[str]:
    return [expr.replace(PANEL_WINDOW, WINDOW) for panel in PANELS for expr in panel.exprs]


def _rule_expressions() -> list[str]:
    """Those of alerts in the form that has a sample also while they do not hold."""
    rules = [rule for group in hurried_rules()["groups"] for rule in group["rules"]]
    return [re.sub(r" (==|<|>) ", r" \1 bool ", rule["expr"]) for rule in rules]


def test_the_first_question_is_run_target_only_and_then_their_share(watched: Watched) -> None:
    with watched.door.client() as client:
        figures = [watched.ask(client) for _ in range(11)]
        named = watched.ask(client, speculative={"policy": "adaptive"})
    calibrations = [i for i, answer in enumerate(figures) if answer["is_calibration"]]
    assert calibrations == [0, 5, 10]
    # Nothing is scored for a draft that takes no part.
    assert {(answer["policy"], answer["pruning"]["strategy"]) for answer in figures[0:11:5]} == {
        ("off", "none")
    }
    assert not figures[0]["draft_used"] and figures[0]["num_forwards"] == NUM_TOKENS - 1
    assert not named["is_calibration"]
    assert figures[0]["estimated_speedup"] is None  # it was the first to show the baseline
    assert all(answer["estimated_speedup"] > 0 for answer in [*figures[1:], named])


def test_every_panel_and_every_rule_has_real_samples_under_traffic(watched: Watched) -> None:
    with watched.traffic():
        for expr in _panel_expressions() + _rule_expressions():
            for _ in range(200):
                if watched.prometheus.is_real(expr):
                    break
                time.sleep(0.05)
            else:
                pytest.fail(f"no real sample within 10 s: {expr}")
    assert watched.prometheus.firing().isdisjoint({"HippoTargetDown", "HippoDraftDown"})


def test_the_speedup_in_prometheus_is_that_of_the_answers(watched: Watched) -> None:
    answers = [answer for answer in watched.answers if answer["policy"] != "off"]
    assert answers
    decode_ms = sum(answer["timings_ms"]["decode"] for answer in answers)
    baseline_ms = sum(
        answer["estimated_speedup"] * answer["timings_ms"]["decode"] for answer in answers
    )
    count = f"sum(hippo_completions_total{{policy!='off'}}) == {len(answers)}"
    wait_until(lambda: watched.prometheus.is_real(count))
    speedup = watched.prometheus.value(
        "sum(hippo_decode_baseline_seconds_total{policy!='off'})"
        " / sum(hippo_decode_seconds_total{policy!='off'})"
    )
    assert speedup == pytest.approx(baseline_ms / decode_ms, rel=0.01)
    num_kept = sum(
        answer["pruning"]["num_kept_tokens"]
        for answer in answers
        if answer["timings_ms"]["draft_prefill"] is not None  # else the draft looked at nothing
    )
    kept = watched.prometheus.value("sum(hippo_visual_tokens_total{fate='kept'})")
    assert kept == num_kept


def test_draft_tokens_add_up(watched: Watched) -> None:
    drafted, accepted, reused, wasted = (
        watched.prometheus.value(f"sum({name})")
        for name in (
            "hippo_drafted_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "hippo_reused_draft_tokens_total{outcome='accepted'}",
            "hippo_wasted_draft_tokens_total",
        )
    )
    assert drafted == accepted + reused + wasted > 0
    per_position = watched.prometheus.value(
        "sum(vllm:spec_decode_num_accepted_tokens_per_pos_total)"
    )
    assert per_position == accepted


@pytest.fixture(scope="module")
def random_draft(
    watched: Watched, pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Child]:
    """A draft that is never right, in the place of the stack's; a test may end it."""
    running, stack = watched.running, watched.running.stack
    model = write_random_draft(Path(pair["draft"]), tmp_path_factory.mktemp("draft") / "random")
    arguments = (
        "--port", str(stack.port("draft")),
        "--metrics-port", str(running.metrics_ports["draft"]),
        "--model", str(model),
        "--dtype", "float32",
        "--slots", "2",
        "--max-context-length", str(running.max_context_length),
        "--num-threads", "1",
    )  # fmt: skip
    stack.child("draft").send_signal(signal.SIGKILL)
    stack.child("draft").wait(10)
    try:
        with process("services.draft", *arguments) as draft:
            wait_until(watched.is_ready)
            yield draft
    finally:
        if not stack.child("draft").is_running:
            stack.start_service("draft")


def test_a_draft_that_is_never_right_is_told(watched: Watched, random_draft: Child) -> None:
    server = watched.prometheus
    expected = {"HippoAcceptanceCollapsed", "HippoRunsShort", "HippoSpeedupBelowOne"}
    with watched.door.client() as client:  # the machine may be faster than when first asked
        for _ in range(5):
            watched.ask(client, speculative={"policy": "off"})
    with watched.traffic(policy="serial", gamma=4):
        wait_until(lambda: expected <= server.firing())
        wait_until(lambda: server.value("hippo:acceptance:ratio") < 0.1)
        wait_until(lambda: 1 <= server.value("hippo:run_length:tokens") < 2)
        for title, least, most in (
            ("How many times as fast as the target alone is decoding now?", 0.01, 1),
            ("How much of what the draft proposes is accepted?", 0, 0.1),
            ("How many tokens pass from one rejection to the next?", 1, 2),
        ):
            while not least <= watched.panel(title) < most:
                time.sleep(0.05)
        assert "HippoAcceptedButSlow" not in server.firing()
        told = hippo("doctor", watched.door.url, "--seconds", "3")
        words = ("draft and target are badly aligned", "speculation costs time")
        while not all(each in told.stdout for each in words):  # of three seconds, which vary
            told = hippo("doctor", watched.door.url, "--seconds", "3")
    assert told.returncode == 1


def test_a_draft_that_is_killed_is_told_and_so_is_its_return(
    watched: Watched, random_draft: Child
) -> None:
    stack, server = watched.running.stack, watched.prometheus
    losses = "sum(hippo_draft_losses_total{cause='unavailable'})"
    before = server.value(losses)
    body = watched.body(100, speculative={"policy": "optimistic"})
    with watched.door.client() as client:
        streamed(client, body, lambda: random_draft.send_signal(signal.SIGKILL))
    why = "How often is the draft lost, and why?"
    wait_until(lambda: watched.panel(why, cause="unavailable") > 0)
    wait_until(lambda: server.value(losses) == before + 1)
    gone = {"HippoDraftDown", "HippoNotScraped"}
    wait_until(lambda: gone <= server.firing())
    assert watched.panel("Are draft and target there?", service="draft") == 0
    assert watched.panel("Are draft and target there?", service="target") == 1
    assert watched.panel("Which processes answer Prometheus?", job="hippo-draft") == 0
    told = hippo("doctor", watched.door.url)
    assert told.returncode == 1
    assert "the draft does not serve" in told.stdout

    stack.start_service("draft")
    wait_until(lambda: not gone & server.firing())
    assert watched.panel("Are draft and target there?", service="draft") == 1
    assert "draft and target serve" in hippo("doctor", watched.door.url).stdout


def test_a_queue_that_fills_is_told_and_so_are_refusals(watched: Watched) -> None:
    server = watched.prometheus
    leave = threading.Event()
    # The draft takes no part, which would be work for nothing.
    body = watched.body(3000, stream=True, speculative={"policy": "off"})

    def ask() -> None:
        with watched.door.client() as client, client.stream("POST", CHAT, json=body) as response:
            for _ in response.iter_lines():
                if leave.is_set():
                    break

    with ThreadPoolExecutor(4) as pool, watched.door.client() as client:
        asked = [pool.submit(ask) for _ in range(4)]
        try:
            wait_until(lambda: watched.panel("How long is the queue for the target?") == 2)
            wait_until(lambda: watched.panel("How many slots are taken?", job="hippo-target") == 1)
            wait_until(lambda: watched.panel("How many requests run, how many wait?") == 2)
            wait_until(lambda: server.value("sum(vllm:num_requests_waiting)") == 2)
            assert [client.post(CHAT, json=body).status_code for _ in range(3)] == [429] * 3
            refused = "sum(hippo_http_requests_total{status='429'})"
            wait_until(lambda: server.value(refused) == 3)
            expected = {"HippoQueueGrowing", "HippoRequestsFailing"}
            wait_until(lambda: expected <= server.firing())
        finally:
            leave.set()
    assert not any(each.exception() for each in asked)
    wait_until(lambda: server.value("sum(vllm:num_requests_running)") == 0)
    wait_until(lambda: "HippoQueueGrowing" not in server.firing())


def test_a_target_that_hangs_is_told(watched: Watched) -> None:
    target, server = watched.running.stack.child("target"), watched.prometheus
    target.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: "HippoTargetDown" in server.firing())
        told = hippo("doctor", watched.door.url)
    finally:
        target.send_signal(signal.SIGCONT)
    assert told.returncode == 1
    assert "the target does not serve" in told.stdout
    wait_until(lambda: "HippoTargetDown" not in server.firing())
    watched.running.stack.wait_ready(timeout_s=60)


def test_the_doctor_says_who_does_not_answer() -> None:
    done = hippo("doctor", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "no gateway answers at" in done.stderr
