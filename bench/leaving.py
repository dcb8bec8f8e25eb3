"""How long a client that goes away holds its slots.

    python -m bench.leaving                     60 clients that leave

Each client asks the bundled pair about a clip and leaves at a random moment: before the first
token, or after some pieces of the stream. Measured is the time from there until draft and target
say that no slot is in use; looking takes some milliseconds of it.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import time
from collections.abc import Sequence

import httpx
from rich.console import Console

from bench.client import user_turn, video_url
from bench.clips import held_out_clips
from bench.environment import ROOT
from bench.runs import bundled_pair, running_stack

_CHAT = "/v1/chat/completions"
_POLL_S = 0.002


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints a line a kind of moment."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.leaving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-clients", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    ports = {"target": _free_port(), "draft": _free_port()}
    options = bundled_pair(
        "float32",
        target_args=("--metrics-port", str(ports["target"])),
        draft_args=("--metrics-port", str(ports["draft"])),
    )
    with running_stack(options) as url:
        seconds = measure(url, list(ports.values()), args.num_clients, random.Random(args.seed))
    console = Console(width=100)
    for moment, values in seconds.items():
        shown = [1e3 * value for value in sorted(values)]
        console.print(
            f"{moment}: {len(shown)} clients, ms until both slots are free: "
            f"p50 {statistics.median(shown):.0f}, most {shown[-1]:.0f}"
        )


def measure(
    url: str, ports: Sequence[int], num_clients: int, randomness: random.Random
) -> dict[str, list[float]]:
    """Seconds that slots were held by clients that had left, by when they left."""
    seconds: dict[str, list[float]] = {"before the first token": [], "in mid-answer": []}
    (clip,) = held_out_clips(ROOT / "bench/out/leaving", kind="short", num_clips=1)
    with httpx.Client(timeout=60, trust_env=False) as client:
        for index in range(num_clients):
            moment = list(seconds)[index % 2]
            body = {
                "model": "hippo",
                "messages": [user_turn(video_url(clip.path), "Describe the video.")],
                "max_tokens": 2000,
                "ignore_eos": True,
                "stream": moment == "in mid-answer",  # else nothing comes before the end
                "temperature": 0,
                "cache_salt": str(index),
                "speculative": {"policy": "optimistic"},
            }
            if moment == "in mid-answer":
                with client.stream("POST", url + _CHAT, json=body) as response:
                    lines = response.iter_lines()
                    for _ in range(randomness.randrange(4, 100)):
                        next(lines)
            else:
                try:
                    client.post(
                        url + _CHAT, json=body, timeout=httpx.Timeout(60, read=_moment(randomness))
                    )
                except httpx.ReadTimeout:
                    pass
            left_s = time.perf_counter()
            while any(_num_used(client, port) for port in ports):
                time.sleep(_POLL_S)
            seconds[moment].append(time.perf_counter() - left_s)
    return seconds


def _moment(randomness: random.Random) -> float:
    """Seconds after the request: its video is read, or its prompt is prefilled."""
    return randomness.uniform(0.02, 0.2)


def _num_used(client: httpx.Client, port: int) -> int:
    text = client.get(f"http://127.0.0.1:{port}/metrics").text
    lines = (line for line in text.splitlines() if line.startswith("hippo_slots_used "))
    return int(float(next(lines).split()[-1]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
