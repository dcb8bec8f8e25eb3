"""A running stack's own speedup against one measured side by side, over the same minutes.

    python -m bench.stack --url http://127.0.0.1:8000 --prometheus http://127.0.0.1:9090

Each clip is asked about as ordinary traffic is (some of which the gateway runs target-only, to
calibrate its baseline), then target-only and adaptive in turn. The client's clock says how much
faster adaptive is; Prometheus says what the stack's metrics say of the same answers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console

from bench.client import Answer, ask, video_url
from bench.clips import Clip, held_out_clips

_SCRAPES_S = 12.0  # until Prometheus has seen the last answer


@dataclass(frozen=True, slots=True)
class Result:
    """Both figures, and what they rest on."""

    num_pairs: int  # of answers, target-only and adaptive
    num_equal: int
    num_calibrations: int
    seconds: int
    measured_decode: float  # speedup by the client's clock
    measured_end_to_end: float
    reported_decode: float  # by the metrics, of the adaptive answers
    reported_target_only: float  # of the target-only answers against the baseline: 1 is right

    @property
    def difference(self) -> float:
        """Of the reported from the measured decode speedup, as a share."""
        return self.reported_decode / self.measured_decode - 1


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.stack", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--num-clips", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder), kind="short", num_clips=args.num_clips)
        result = measure(args.url, args.prometheus, clips, rounds=args.rounds)
    console = Console()
    if args.json:
        console.print_json(json.dumps(asdict(result)))
        return
    console.print(
        f"{result.num_pairs} pairs of answers in {result.seconds} s, {result.num_equal} equal; "
        f"{result.num_calibrations} calibrations\n"
        f"decode speedup: side by side {result.measured_decode:.2f}, by the metrics "
        f"{result.reported_decode:.2f} ({result.difference:+.1%})\n"
        f"end to end, side by side {result.measured_end_to_end:.2f}; target-only against the "
        f"baseline {result.reported_target_only:.2f}",
        highlight=False,
        soft_wrap=True,
    )


def measure(url: str, prometheus: str, clips: Sequence[Clip], *, rounds: int) -> Result:
    """Asks, then queries; raises httpx.HTTPError or RuntimeError when either side fails."""
    alone: list[Answer] = []
    pair: list[Answer] = []
    start = time.monotonic()
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:

        def one(clip: Clip, policy: str | None) -> Answer:
            return ask(
                client,
                video_url(clip.path),
                clip.question,
                speculative={"policy": policy} if policy else {},
                is_video_first=clip.is_video_first,
            )

        for _ in range(rounds):
            for clip in clips:
                one(clip, None)
                alone.append(one(clip, "off"))
                pair.append(one(clip, "adaptive"))
    time.sleep(_SCRAPES_S)
    seconds = math.ceil(time.monotonic() - start)

    def reported(policy: str) -> float:
        spent, baseline = (
            f'increase({name}{{policy="{policy}"}}[{seconds}s])'
            for name in ("hippo_decode_seconds_total", "hippo_decode_baseline_seconds_total")
        )
        return _query(prometheus, f"sum({baseline}) / sum({spent})")

    return Result(
        num_pairs=len(pair),
        num_equal=sum(a.token_ids == b.token_ids for a, b in zip(alone, pair, strict=True)),
        num_calibrations=round(_query(prometheus, "sum(hippo_calibrations_total)")),
        seconds=seconds,
        measured_decode=sum(a.decode_s for a in alone) / sum(a.decode_s for a in pair),
        measured_end_to_end=sum(a.end_to_end_s for a in alone) / sum(a.end_to_end_s for a in pair),
        reported_decode=reported("adaptive"),
        reported_target_only=reported("off"),
    )


def _query(prometheus: str, expression: str) -> float:
    answer = httpx.get(
        f"{prometheus}/api/v1/query", params={"query": expression}, timeout=30, trust_env=False
    )
    answer.raise_for_status()
    rows = answer.json()["data"]["result"]
    if not rows:
        raise RuntimeError(f"Prometheus knows nothing of {expression}")
    return float(rows[0]["value"][1])


if __name__ == "__main__":
    main()
