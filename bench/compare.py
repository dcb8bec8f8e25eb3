"""Compares gateways with different settings on one pair: ``python -m bench.compare``.

    python -m bench.compare "--max-draft-tokens 16" "--max-draft-tokens 31"
    python -m bench.compare "" "--policy vpsd --gamma 7" --dtype bfloat16

All gateways, one for each set of arguments, use the same draft and target. Each clip is asked about
through all gateways within a second or two, in random order, so that slow periods of the machine
affect all alike and differences of a few percent show. Only one gateway is busy at a time. The
first gateway is the reference.
"""

import argparse
import contextlib
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.answers.runs import FORM, bundled_pair, questions_about, running_stack
from bench.base.cells import Columns, cells, equal
from bench.base.clips import held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from bench.base.tables import wide_table
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.cli.processes import Child, StackError
from hippo.cli.stack import Stack, StackOptions
from hippo.client.answers import Answer
from hippo.client.figures import spread
from hippo.client.requests import Question, RequestForm
from hippo.client.server import Connection, Server
from hippo.client.tables import progress_bar

_READY_SECONDS = 60.0
COLUMNS: Columns = {
    "gateway": lambda row: row["settings"] or "(defaults)",
    "ms/token": lambda row: f"{row['ms_per_token']:.3f}",
    "forwards": lambda row: f"{row['num_forwards']:.1f}",
    "blocks": lambda row: f"{row['num_blocks']:.1f}",
    "target waits ms": lambda row: f"{row['wait_ms']:.1f}",
    "decode time over the first's": lambda row: _interval(row["decode"]),
    "end to end": lambda row: _interval(row["end_to_end"]),
    "equal": equal,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table and writes JSON."""
    args = _parse(argv)
    console = Console(width=120)
    pair = bundled_pair(args.dtype)
    form = replace(FORM, temperature=args.temperature, further={"return_timeline": True})
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        options = replace(pair, draft_model=find_draft(args.draft_model, folder, args.kind))
        stack = ending.enter_context(running_stack(options))
        clips = held_out_clips(folder / "clips", kind=args.kind, num_clips=args.num_clips)
        with _gateways(stack, options, args.settings, folder) as connections:
            answers = _ask_all(
                console, connections, form, questions_about(clips), num_repeats=args.repeats
            )
    result = new_result("bench.compare", argv, rows=compare(args.settings, answers))
    console.print(wide_table(result["command"], COLUMNS, cells(COLUMNS, result["rows"])))
    write_result(args.out, result)
    console.print(f"written to {args.out}")


@contextlib.contextmanager
def _gateways(
    stack: Stack, options: StackOptions, settings: Sequence[str], folder: Path
) -> Iterator[list[Connection]]:
    """Starts a gateway for each of the settings; yields a connection to each, ready to answer."""
    core = () if options.draft_core is None else ("--cpu-core", str(options.draft_core))
    peers = [
        argument for name in ("draft", "target") for argument in (f"--{name}", stack.address(name))
    ]
    with contextlib.ExitStack() as ending:
        connections = []
        for number, arguments in enumerate(settings):
            port_file = folder / f"gateway-{number}.port"
            child = Child(f"gateway {number}", lambda name, line: None)
            own = ("--host", options.host, "--port", "0", "--port-file", str(port_file), *core)
            child.start("gateway", [*own, *peers, *shlex.split(arguments)])
            ending.callback(_stop_child, child)
            _await(child, port_file.exists)
            url = f"http://{options.host}:{int(port_file.read_text())}"
            _await(child, partial(_is_ready, url))
            connections.append(Server(url).connect())
            ending.callback(connections[-1].close)
        yield connections


def _await(child: Child, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not is_done():
        child.check_running()
        if time.monotonic() > deadline:
            raise StackError(f"{child.name} is not ready after {_READY_SECONDS:g} s")
        time.sleep(0.05)


def _is_ready(url: str) -> bool:
    return bool(httpx.get(f"{url}/ready", trust_env=False).json().get("draft") == "ready")


def _stop_child(child: Child) -> None:
    child.send_signal(15)
    if not child.wait(10.0):
        child.send_signal(9)


def _ask_all(
    console: Console,
    connections: Sequence[Connection],
    form: RequestForm,
    questions: Sequence[Question],
    *,
    num_repeats: int,
) -> list[list[Answer]]:
    """Returns each gateway's answers in the order of questions, after one round that is not
    counted."""
    rng = random.Random(0)
    answers: list[list[Answer]] = [[] for _ in connections]
    bodies = [form.request(question) for question in questions] * (num_repeats + 1)
    with progress_bar(console) as progress:
        for request in progress.track(bodies, description="asking all gateways"):
            for place in rng.sample(range(len(connections)), len(connections)):
                answers[place].append(connections[place].ask(request.body()))
    return [each[len(questions) :] for each in answers]


def compare(settings: Sequence[str], answers: Sequence[Sequence[Answer]]) -> list[dict[str, Any]]:
    """Returns a row per gateway from its answers with timelines: means per answer, and times
    divided by the first gateway's, with 95 % bootstrap intervals over pairs of answers to the same
    question. Decode times are by the gateway's clock, others by the client's."""
    rows = []
    for arguments, own in zip(settings, answers, strict=True):
        pairs = list(zip(answers[0], own, strict=True))
        verdicts = [each.figures["timeline_ms"]["verdicts"][1:] for each in own]
        rows.append(
            {
                "settings": arguments,
                "num_answers": len(own),
                "num_equal": sum(first.token_ids == each.token_ids for first, each in pairs),
                "ms_per_token": sum(map(_decode_ms, own)) / sum(e.num_tokens - 1 for e in own),
                "num_forwards": statistics.fmean(map(len, verdicts)),
                "num_blocks": statistics.fmean(each.figures["num_blocks"] for each in own),
                "wait_ms": statistics.fmean(sum(v["wait"] for v in each) for each in verdicts),
                "decode": spread([_decode_ms(each) / _decode_ms(first) for first, each in pairs]),
                "end_to_end": spread(
                    [each.end_to_end_s / first.end_to_end_s for first, each in pairs]
                ),
            }
        )
    return rows


def _decode_ms(answer: Answer) -> float:
    return float(answer.figures["timings_ms"]["decode"])


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


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
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
