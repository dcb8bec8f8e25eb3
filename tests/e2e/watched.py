"""A gateway that a real Prometheus watches, with traffic for it and what its panels show."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.support import GREEDY, Running, data_url, video_message
from tests.support.dashboards import PANEL_WINDOW, PANELS
from tests.support.prometheus import WINDOW, Prometheus

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Watched:
    """A gateway of its own before the running services, and the Prometheus that watches all."""

    running: Running
    url: str
    prometheus: Prometheus
    answers: list[dict[str, Any]] = field(default_factory=list)  # their `hippo` objects

    def body(self, num_tokens: int = 48, **fields: Any) -> dict[str, Any]:
        return {
            "model": "hippo",
            "messages": [video_message(data_url(self.running.clip))],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            **GREEDY,
            **fields,
        }

    def ask(self, client: httpx.Client, **fields: Any) -> dict[str, Any]:
        response = client.post(CHAT, json=self.body(**fields))
        figures: dict[str, Any] = response.raise_for_status().json()["hippo"]
        self.answers.append(figures)
        return figures

    def panel(self, title: str, **labels: str) -> float:
        """What the first query of a panel shows for these labels now; NaN for nothing."""
        (panel,) = [panel for panel in PANELS if panel.title == title]
        samples = self.prometheus.query(panel.exprs[0].replace(PANEL_WINDOW, WINDOW))
        values = [item.value for item in samples if labels.items() <= item.labels.items()]
        assert len(values) <= 1, title
        return values[0] if values else math.nan

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    @contextmanager
    def traffic(self, **speculative: Any) -> Iterator[None]:
        """Questions one after another, of a few kinds or as said; every second one reuses nothing
        that is cached, so that something is left to compute."""
        kinds: list[dict[str, Any]] = [speculative] if speculative else [
            {"pruning": {"strategy": "uniform", "ratio": 0.5}},
            {"policy": "vpsd", "gamma": 4},
            {},
        ]  # fmt: skip
        leave = threading.Event()
        errors: list[Exception] = []

        def work() -> None:
            try:
                with self.client() as client:
                    while not leave.is_set():
                        for kind in kinds:
                            self.ask(client, speculative=kind)
                            self.ask(client, speculative=kind, cache_salt=uuid.uuid4().hex)
                        client.post(CHAT, json={"model": "unknown", "messages": []})
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            leave.set()
            thread.join()
        assert errors == []

    def doctor(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hippo.cli", "doctor", self.url, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "200"},
        )

    def is_ready(self) -> bool:
        """Whether the draft is loaded, and the gateway knows it."""
        try:
            answer = httpx.get(f"{self.url}/ready", trust_env=False)
        except httpx.HTTPError:
            return False
        is_known = answer.status_code == 200 and answer.json()["draft"] == "ready"
        return is_known and self.running.metric("draft", "hippo_slots") == 2
