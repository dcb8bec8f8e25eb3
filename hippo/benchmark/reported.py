"""What a stack's own metrics say of the answers that were just measured from outside."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from hippo.benchmark.latency import TARGET_ONLY, Record
from hippo.errors import InvalidRequestError, UnavailableError

_LONGEST_SCRAPE_S = 90.0  # a usual interval is 15 to 60
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Reported:
    """A policy's decode speedup side by side, by the answers, and by the stack's metrics."""

    policy: str
    seconds: int  # the window of the metrics
    num_calibrations: int
    measured_decode: float
    reported_decode: float
    reported_target_only: float  # of target-only answers against the baseline: 1 is right

    @property
    def difference(self) -> float:
        """Of the reported from the measured speedup, as a share."""
        return self.reported_decode / self.measured_decode - 1


class Prometheus:
    """A Prometheus that scrapes the stack. Raises HippoError as its queries do."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def check(self) -> None:
        """Raises UnavailableError or InvalidRequestError if it cannot be queried."""
        self._rows("vector(1)")

    def wait_for_scrape(self) -> None:
        """Until all that has happened is known; raises UnavailableError if it never is."""
        last = f"{self.value('time()')} < min(timestamp(hippo_decode_seconds_total))"
        for _ in range(round(_LONGEST_SCRAPE_S / _POLL_S)):
            if self._rows(last):
                return
            time.sleep(_POLL_S)
        raise UnavailableError(f"Prometheus at {self._url} does not scrape this gateway")

    def value(self, expression: str) -> float:
        """Of an expression with one sample."""
        found = self._rows(expression)
        if not found or math.isnan(found[0]):
            raise UnavailableError(f"Prometheus at {self._url} knows nothing of {expression}")
        return found[0]

    def _rows(self, expression: str) -> list[float]:
        """The values of all samples."""
        try:
            answer = httpx.get(
                f"{self._url}/api/v1/query",
                params={"query": expression},
                timeout=30,
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{self._url} is no address: {error}") from None
        except httpx.HTTPError as error:
            raise UnavailableError(f"no Prometheus answers at {self._url} ({error})") from None
        try:
            data = answer.raise_for_status().json()["data"]
            pairs = (
                [data["result"]]
                if data["resultType"] == "scalar"
                else [sample["value"] for sample in data["result"]]
            )
            return [float(value) for _, value in pairs]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
            raise UnavailableError(
                f"{self._url} is no Prometheus: it answered a query with {answer.status_code}"
            ) from None


def compare_reported(
    prometheus: Prometheus, records: Sequence[Record], *, policy: str, system: str, start_s: float
) -> Reported:
    """Waits for the scrapes of the last answer, then asks for the time since ``start_s``.

    ``start_s`` is of ``time.monotonic()``. Raises HippoError as ``Prometheus.value`` does.
    """
    prometheus.wait_for_scrape()
    seconds = math.ceil(time.monotonic() - start_s)

    def reported(policy: str) -> float:
        spent, baseline = (
            f'increase({name}{{policy="{policy}"}}[{seconds}s])'
            for name in ("hippo_decode_seconds_total", "hippo_decode_baseline_seconds_total")
        )
        return prometheus.value(f"sum({baseline}) / sum({spent})")

    def decode_s(system: str) -> float:
        times = [record.answer.decode_s for record in records if record.system == system]
        return sum(times) / len(times)

    return Reported(
        policy=policy,
        seconds=seconds,
        num_calibrations=round(prometheus.value("sum(hippo_calibrations_total)")),
        measured_decode=decode_s(TARGET_ONLY) / decode_s(system),
        reported_decode=reported(policy),
        reported_target_only=reported("off"),
    )
