"""A real Prometheus with this project's rules, in a hurry: it scrapes twice a second, rates look
back a few seconds, and alerts fire at once."""

import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

BINARY = shutil.which("prometheus")
RULES = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "rules" / "hippo.yml"
WINDOW = "10s"


class Prometheus:
    """A running server, asked over HTTP."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The expression's samples now: labels and value of each."""
        body = self._client.get("/api/v1/query", params={"query": expr}).json()
        assert body["status"] == "success", f"{expr}: {body['error']}"
        assert body["data"]["resultType"] == "vector", expr
        return [(item["metric"], float(item["value"][1])) for item in body["data"]["result"]]

    def value(self, expr: str, **labels: str) -> float:
        """The value of the only sample with these labels; NaN while there is none."""
        values = [value for own, value in self.query(expr) if labels.items() <= own.items()]
        assert len(values) <= 1, expr
        return values[0] if values else math.nan

    def is_real(self, expr: str) -> bool:
        """Whether there is a sample, and every one is a number."""
        samples = self.query(expr)
        return bool(samples) and all(math.isfinite(value) for _, value in samples)

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, port: int, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrapes ``targets`` (address by job); stopped at the end."""
    assert BINARY is not None
    (folder / "rules.yml").write_text(yaml.safe_dump(hurried_rules()))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(targets)))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            while not _is_ready(client):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(20)


def hurried_rules() -> dict[str, Any]:
    """The rules with short windows, and alerts that wait for nothing."""
    text = RULES.read_text().replace("[5m]", f"[{WINDOW}]")
    text = re.sub(r"^ +(for|interval): \w+\n", "", text, flags=re.MULTILINE)
    rules: dict[str, Any] = yaml.safe_load(text)
    return rules


def _config(targets: Mapping[str, str]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]}
            for job, address in targets.items()
        ],
    }


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.HTTPError:
        return False
