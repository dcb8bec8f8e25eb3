"""Gateways before pairs that they find by DNS, of which one comes later and goes; mutual TLS."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hippo.cli.processes import Child
from tests.e2e.support import (
    CHAT,
    Running,
    chat_body,
    chunks_of,
    data_url,
    free_port,
    plain_client,
    process,
    readiness,
    text_of,
    video_message,
    wait_until,
    write_clip,
)
from tests.support.watching.otlp import Receiver, otlp_receiver

SECOND = "127.0.0.2"  # the host of the second pair, whose ports are those of the first


@dataclass
class Cluster:
    """Two gateways, the second pair, and the file that stands for DNS."""

    urls: tuple[str, str]
    names: Path
    second: tuple[Child, Child]  # target, draft
    receiver: Receiver
    lines: list[str]  # what the gateways logged

    def list_hosts(self, *hosts: str) -> None:
        """What DNS lists from now on; waits until both gateways use those pairs."""
        part = self.names.with_suffix(".new")
        part.write_text(f"pairs.example {' '.join(hosts)}\n")
        part.replace(self.names)
        wait_until(lambda: all(self.num_up(url) == len(hosts) for url in self.urls))

    def num_up(self, url: str) -> int:
        """Pairs of which both services are up; -1 if others are still listed."""
        ready = readiness(url)
        counts = [] if ready is None else [ready["num_targets"], ready["num_drafts"]]
        same = len({(count["up"], count["all"]) for count in counts}) == 1
        return int(counts[0]["up"]) if same and counts[0]["up"] == counts[0]["all"] else -1

    def ask(self, number: int, **fields: Any) -> httpx.Response:
        """Asks one of the gateways in turn."""
        with plain_client(self.urls[number % 2]) as client:
            return client.post(CHAT, json=chat_body(None, 16, **fields))


@pytest.fixture(scope="module")
def cluster(
    running: Running, pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    names = tmp_path_factory.mktemp("names") / "hosts"
    names.write_text("pairs.example 127.0.0.1\n")
    flags = (
        "--host", SECOND,
        "--dtype", "float32",
        "--slots", "2",
        "--max-context-length", str(running.max_context_length),
        "--num-threads", "1",
    )  # fmt: skip
    ports = {name: str(running.stack.port(name)) for name in ("target", "draft")}
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        receiver = stack.enter_context(otlp_receiver())
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        second = (
            process(
                "services.target", *flags, "--model", pair["target"], "--served-name", "hippo",
                "--port", ports["target"], "--max-queue", "2",
            ),
            process("services.draft", *flags, "--model", pair["draft"], "--port", ports["draft"]),
        )  # fmt: skip
        children = tuple(map(stack.enter_context, second))
        doors, lines = [free_port(), free_port()], list[str]()
        for port in doors:
            stack.enter_context(
                process(
                    "tests.support.running.named_gateway", str(names),
                    "--port", str(port),
                    "--target", f"dns+pairs.example:{ports['target']}",
                    "--draft", f"dns+pairs.example:{ports['draft']}",
                    "--lookup-period-s", "0.2",
                    "--calibration-share", "0",
                    "--services-silence-s", "4",
                    lines=lines,
                )
            )  # fmt: skip
        first, other = (f"http://127.0.0.1:{port}" for port in doors)
        found = Cluster((first, other), names, (children[0], children[1]), receiver, lines)
        wait_until(lambda: all(found.num_up(url) == 1 for url in found.urls))
        found.list_hosts("127.0.0.1", SECOND)
        yield found


def test_a_clip_goes_to_one_target_whichever_gateway_is_asked(
    cluster: Cluster, running: Running, tmp_path: Path
) -> None:
    before = running.metric("target", "hippo_sequences_total")
    num_here, num_asked = 0.0, 0
    while num_here in (0, num_asked):  # until each target has had a clip
        number = num_asked // 2
        url = data_url(write_clip(tmp_path / f"{number}.mp4", num_frames=8 + number))
        messages = [video_message(url)]
        first = cluster.ask(0, messages=messages).raise_for_status().json()
        again = cluster.ask(1, messages=messages).raise_for_status().json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        num_asked += 2
        num_here = running.metric("target", "hippo_sequences_total") - before
        assert num_here % 2 == 0


def test_a_trace_goes_through_three_processes(cluster: Cluster) -> None:
    def complete() -> bool:
        services: dict[str, set[str]] = {}
        for span in list(cluster.receiver.spans):
            services.setdefault(span.trace_id, set()).add(span.service)
        return {"hippo-gateway", "hippo-target", "hippo-draft"} in services.values()

    wait_until(complete)


def test_full_slots_queue_and_no_answer_is_lost(cluster: Cluster, running: Running) -> None:
    """Two targets with two slots and two places in the queue each: eight requests at once."""
    body: dict[str, Any] = {"messages": [video_message(data_url(running.clip))], "max_tokens": 48}
    with plain_client(running.url) as client:
        expected = client.post(CHAT, json=chat_body(None, 16, **body)).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        salted = [{**body, "cache_salt": str(number)} for number in range(8)]
        answers = list(pool.map(lambda number: cluster.ask(number, **salted[number]), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(answer.json()["choices"] == expected for answer in answers)


def test_a_pair_that_stops_loses_no_answer(cluster: Cluster, running: Running) -> None:
    body = chat_body(data_url(running.clip), 80)
    with plain_client(running.url) as client:
        expected = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    begun = threading.Barrier(5)

    def stream(number: int) -> str:
        chunks = []
        salted = {**body, "stream": True, "cache_salt": str(number)}
        with (
            plain_client(cluster.urls[number % 2]) as client,
            client.stream("POST", CHAT, json=salted) as response,
        ):
            for chunk in chunks_of(response):
                chunks.append(chunk)
                if len(chunks) == 3:
                    begun.wait(30)
        return text_of(chunks)

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, number) for number in range(4)]
        begun.wait(30)  # both slots of each target are taken
        for child in cluster.second:
            child.send_signal(signal.SIGTERM)
        later = [cluster.ask(number, cache_salt=f"later {number}") for number in range(4)]
        assert [answer.status_code for answer in later] == [200] * 4, [
            answer.text for answer in later if answer.status_code != 200
        ] + cluster.lines[-20:]
        assert [each.result() for each in streams] == [expected] * 4
    assert all(child.wait(20) for child in cluster.second)
    cluster.list_hosts("127.0.0.1")
    assert cluster.ask(1).status_code == 200


def test_a_gateway_asks_its_services_by_mutual_tls(pki: Path, pair: dict[str, str]) -> None:
    """Who else is let in: tests/integration/services/test_service_lifecycle.py."""
    target, draft, gateway = (str(free_port()) for _ in range(3))
    ca, cert, key = (str(pki / name) for name in ("ca.pem", "service.pem", "service.key"))
    tls = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", ca)
    small = ("--slots", "1", "--max-context-length", "256", "--num-threads", "1")
    options = ("--served-name", "hippo", *tls, *small)
    by_tls = (
        *("--services-tls", "--services-tls-ca", ca),
        *("--services-tls-cert", cert, "--services-tls-key", key),
    )
    services = ("--target", f"127.0.0.1:{target}", "--draft", f"127.0.0.1:{draft}")
    url = f"http://127.0.0.1:{gateway}"
    with (
        process("services.target", "--port", target, "--model", pair["target"], *options),
        process("services.draft", "--port", draft, "--model", pair["draft"], *options),
        process("gateway", "--port", gateway, *services, *by_tls),
    ):
        wait_until(lambda: (readiness(url) or {}).get("draft") == "ready")
        answer = httpx.post(url + CHAT, json=chat_body(None, 8), trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
