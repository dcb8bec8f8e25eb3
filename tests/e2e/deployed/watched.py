"""A gateway that a real Prometheus watches, with traffic for it and what its panels show."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.support import CHAT, Door, Running, chat_body, data_url, readiness
from tests.support.watching.dashboards import PANEL_WINDOW, PANELS
from tests.support.watching.prometheus import WINDOW, Prometheus

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
        samples = self.prometheus.query(panel.exprs[0].replace(PANEL_WINDOW, WINDOW))
        values = [item.value for item in samples if labels.items() <= item.labels.items()]
        assert len(values) <= 1, title
        return values[0] if values else math.nan

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
        errors: list[Exception] = []

        def work() -> None:
            try:
                with self.door.client() as client:
                    while not leave.wait(0.5):
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

    def is_ready(self) -> bool:
        """Whether the draft is loaded, and the gateway knows it."""
        ready = readiness(self.door.url)
        is_known = ready is not None and ready["draft"] == "ready"
        return is_known and self.running.metric("draft", "hippo_slots") == 2
