"""Compares gateways with different settings on one pair: ``python -m bench.compare``.

    python -m bench.compare "--max-draft-tokens 16" "--max-draft-tokens 31"
    python -m bench.compare "" "--policy vpsd --gamma 7" --dtype bfloat16

All gateways, one for each set of arguments, use the same draft and target. Each clip is asked about
through all gateways within a second or two, in random order, so that slow periods of the machine
affect all alike and differences of a few percent show. Only one gateway is busy at a time. The
first gateway is the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from rich.console import Console

from bench.answers.client import Answer, ask, video_url
from bench.answers.runs import bundled_pair, running_stack
from bench.base.clips import ClipFile, Kind, held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from bench.base.tables import wide_table
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.cli.processes import Child, StackError
from hippo.cli.stack import Stack, StackOptions
from hippo.client.figures import spread
from hippo.client.tables import progress_bar

_READY_SECONDS = 60.0
_COLUMNS = (
    *("gateway", "ms/token", "forwards", "blocks", "target waits ms"),
    *("decode time over the first's", "end to end", "equal"),
)


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """The figures of one answer through one gateway."""

    num_tokens: int
    decode_ms: float  # from first to last token, by the gateway's clock
    end_to_end_ms: float  # from request to last token, by the client's clock
    num_forwards: int
    num_blocks: int
    wait_ms: float  # time that the target waits for the draft
    token_ids: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table and writes JSON."""
    args = _parse(argv)
    console = Console(width=120)
    pair, kind = bundled_pair(args.dtype), cast(Kind, args.kind)
    with contextlib.ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory())
        draft = find_draft(args.draft_model, Path(folder), kind)
        options = dataclasses.replace(pair, draft_model=draft)
        stack = ending.enter_context(running_stack(options))
        clips = held_out_clips(Path(folder) / "clips", kind=kind, num_clips=args.num_clips)
        with _gateways(stack, options, args.settings, Path(folder)) as clients:
            samples = _ask_all(console, clients, clips, args)
    result = new_result("bench.compare", argv, settings=args.settings, rows=compare(samples))
    console.print(wide_table(result["command"], _COLUMNS, cells(result)))
    write_result(args.out, result)
    console.print(f"written to {args.out}")


@contextlib.contextmanager
def _gateways(
    stack: Stack, options: StackOptions, settings: Sequence[str], folder: Path
) -> Iterator[list[httpx.Client]]:
    """Starts a gateway for each of the settings; yields a client for each when all are ready."""
    with contextlib.ExitStack() as ending:
        clients = []
        for number, arguments in enumerate(settings):
            port_file = folder / f"gateway-{number}.port"
            child = Child(f"gateway {number}", lambda name, line: None)
            core = () if options.draft_core is None else ("--cpu-core", str(options.draft_core))
            own = ("--host", options.host, "--port", "0", "--port-file", str(port_file), *core)
            peers = [
                argument
                for name in ("draft", "target")
                for argument in (f"--{name}", stack.address(name))
            ]
            child.start("gateway", [*own, *peers, *shlex.split(arguments)])
            ending.callback(_stop_child, child)
            url = f"http://{options.host}:{_wait_for_port(child, port_file)}"
            client = httpx.Client(base_url=url, timeout=600, trust_env=False)
            clients.append(ending.enter_context(client))
            _await_ready(child, client)
        yield clients


def _wait_for_port(child: Child, port_file: Path) -> int:
    deadline = time.monotonic() + _READY_SECONDS
    while not port_file.exists():
        child.check_running()
        if time.monotonic() > deadline:
            raise StackError(f"{child.name} does not listen after {_READY_SECONDS:g} s")
        time.sleep(0.05)
    return int(port_file.read_text())


def _await_ready(child: Child, client: httpx.Client) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while (state := client.get("/ready").json()).get("draft") != "ready":
        child.check_running()
        if time.monotonic() > deadline:
            raise StackError(f"{child.name} is not ready after {_READY_SECONDS:g} s: {state}")
        time.sleep(0.1)


def _stop_child(child: Child) -> None:
    child.send_signal(15)
    if not child.wait(10.0):
        child.send_signal(9)


def _ask_all(
    console: Console,
    clients: Sequence[httpx.Client],
    clips: Sequence[ClipFile],
    args: argparse.Namespace,
) -> list[list[GatewayAnswer]]:
    """Returns each gateway's answers in the order of clips, after one untimed round."""
    rng = random.Random(0)
    samples: list[list[GatewayAnswer]] = [[] for _ in clients]
    with progress_bar(console) as progress:
        num_answers = len(clips) * len(clients) * (args.repeats + 1)
        task = progress.add_task("asking all gateways", total=num_answers)
        for turn in range(args.repeats + 1):
            for number, clip in enumerate(clips):
                for place in rng.sample(range(len(clients)), len(clients)):
                    answer = ask(
                        clients[place],
                        video_url(clip.path),
                        clip.question,
                        speculative={},
                        seed=number,
                        temperature=args.temperature,
                        is_video_first=clip.is_video_first,
                        has_timeline=True,
                    )
                    if turn:
                        samples[place].append(sample_of(answer))
                    progress.advance(task)
    return samples


def sample_of(answer: Answer) -> GatewayAnswer:
    """Returns the figures of an answer with a timeline."""
    figures = answer.figures
    verdicts = figures["timeline_ms"]["verdicts"][1:]
    return GatewayAnswer(
        num_tokens=answer.num_tokens,
        decode_ms=figures["timings_ms"]["decode"],
        end_to_end_ms=1e3 * (answer.piece_s[-1] - answer.asked_s),
        num_forwards=len(verdicts),
        num_blocks=figures["num_blocks"],
        wait_ms=sum(verdict["wait"] for verdict in verdicts),
        token_ids=tuple(answer.token_ids),
    )


def compare(samples: Sequence[Sequence[GatewayAnswer]]) -> list[dict[str, Any]]:
    """Returns a row per gateway: means per answer, and times divided by the first gateway's, with
    95 % bootstrap intervals over pairs of answers to the same question."""
    rows = []
    for own in samples:
        pairs = list(zip(samples[0], own, strict=True))
        rows.append(
            {
                "num_answers": len(own),
                "num_equal": sum(one.token_ids == other.token_ids for one, other in pairs),
                "ms_per_token": sum(one.decode_ms for one in own)
                / sum(one.num_tokens - 1 for one in own),
                "num_forwards": statistics.fmean(one.num_forwards for one in own),
                "num_blocks": statistics.fmean(one.num_blocks for one in own),
                "wait_ms": statistics.fmean(one.wait_ms for one in own),
                "decode": spread([own.decode_ms / one.decode_ms for one, own in pairs]),
                "end_to_end": spread([own.end_to_end_ms / one.end_to_end_ms for one, own in pairs]),
            }
        )
    return rows


def cells(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the cells of each gateway's row."""
    for arguments, row in zip(result["settings"], result["rows"], strict=True):
        decode, whole = (
            f"{row[key]['mean']:.3f} [{row[key]['low']:.3f}, {row[key]['high']:.3f}]"
            for key in ("decode", "end_to_end")
        )
        yield [
            arguments or "(defaults)",
            f"{row['ms_per_token']:.3f}",
            f"{row['num_forwards']:.1f}",
            f"{row['num_blocks']:.1f}",
            f"{row['wait_ms']:.1f}",
            decode,
            whole,
            f"{row['num_equal']}/{row['num_answers']}",
        ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.compare", __doc__)
    add = parser.add_argument
    add("settings", nargs="+", help="arguments of a gateway, quoted; '' for none")
    add("--kind", default="short", choices=("short", "long"), help="of the held-out prompts")
    add("--dtype", default="float32")
    add("--draft-model", default=BUNDLED, help=HELP)
    add("--temperature", type=float, default=0.0)
    add("--num-clips", type=int, default=20)
    add("--repeats", type=int, default=5, help="times that each clip is asked about")
    add_out(parser, "compare.json")
    args = parser.parse_args(argv)
    return args


if __name__ == "__main__":
    main()
