"""``hippo simulate``: what each policy would reach on a machine that need not be at hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from hippo.cli import simulate_show as show
from hippo.cli.parsers import Subparsers, add_command
from hippo.cli.simulate_options import (
    drawn_of,
    machine_of,
    placements_of,
    ratio_of,
    traces_of,
)
from hippo.errors import InvalidRequestError
from hippo.simulation.hardware import GPUS
from hippo.simulation.machine import Machine
from hippo.simulation.pairs import PAIRS, ModelPair
from hippo.simulation.plots import draw_sweeps
from hippo.simulation.replay import Row, compare, parse_policies
from hippo.simulation.sweeps import QUANTITIES, VALUES, Quantity, Sweep, sweep
from hippo.simulation.traces import Trace, mean_agreement

_DESCRIPTION = """\
Predicts how fast each policy decodes, by running the services' own three cores (drafter, verifier,
coordinator) and policies in virtual time. A machine says what everything takes; a trace says which
of the target's tokens the draft would have proposed. Efficiency is the predicted speed over that of
the ideal: the same step times without transport, messages and scheduling.
"""
_EXAMPLES = """\
a machine (without any of these: --pair qwen-7b-72b):
  hippo simulate --pair qwen-7b-32b                     one of the papers' pairs on H200s
  hippo simulate --pair qwen-7b-72b --gpu a100 --target-gpus 4
  hippo simulate --target-ms 20 --draft-ms 4            step times that you know

agreement (without any of these: a share of 0.9):
  hippo simulate --acceptance 0.95 --burstiness 0
  hippo simulate --run-length 8                         tokens between two rejections
  hippo simulate --traces bench/out/agreement.jsonl     lines such as 110111, or JSON

what if:
  hippo simulate --pair llava-7b-72b --delay-ms 2       the services are far apart
  hippo simulate --pair qwen-7b-32b --sweep acceptance,ratio,delay --plot speedup.svg
  hippo simulate --policies adaptive,serial:best,vpsd:7 --json out.json

Nothing here is measured: step times of a --pair come from its bytes over the GPU's bandwidth.
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "simulate",
        run,
        help="predict the speedup of each policy on a given machine",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add("--pair", help=f"one of {', '.join(PAIRS)}")
    add("--gpu", choices=GPUS, help="of both models of a --pair (default: h200)")
    add("--target-gpus", type=int, help="GPUs that share the target of a --pair")
    add("--ratio", type=float, help="share of visual tokens pruned for its draft (default: 0.9)")
    add("--visual-tokens", type=int, help="of its prompt (default: 25000)")
    add("--target-ms", type=float, help="the target's step with one row; with --draft-ms")
    add("--draft-ms", type=float, help="the draft's step")
    add("--row-ms", type=float, help="each further row of the target (default: 2%% of a step)")
    add("--delay-ms", type=float, help="a message between a service and the gateway, one way")
    add("--message-ms", type=float, help="processor time of a message on either device")
    add("--scheduling-ms", type=float, help="the target's host between two steps")
    add("--jitter", type=float, help="spread of all times, such as 0.05 (default: the machine's)")
    group = parser.add_argument_group("agreement")
    add = group.add_mutually_exclusive_group().add_argument
    add("--acceptance", type=float, help="share of tokens on which the draft agrees")
    add("--run-length", type=float, help="mean number of tokens between two rejections")
    add("--traces", type=Path, help="a file of agreement traces")
    add = group.add_argument
    add("--burstiness", type=float, help="0: rejections are independent; 1: they come together")
    add("--num-traces", type=int, help="answers drawn (default: 12)")
    add("--tokens", type=int, help="tokens of each (default: 256)")
    add("--seed", type=int, help="of the drawn answers (default: 0)")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--policies", default="serial:best,vpsd:best,adaptive", help="default: %(default)s")
    add("--sweep", default="", help=f"comma-separated, of {', '.join(QUANTITIES)}")
    add("--plot", type=Path, help="draw the sweeps into an SVG file")
    add("--json", type=Path, help="write all figures")


def run(arguments: argparse.Namespace) -> int:
    """Predicts; the exit code."""
    console = Console()
    policies = parse_policies(arguments.policies)
    quantities = _quantities(arguments)
    pair, machine = machine_of(arguments)
    traces = traces_of(arguments, pair)
    with console.status("replaying ..."):
        rows = compare(policies, traces, machine)
    console.print(show.machine_table(machine))
    if pair is not None:
        console.print(show.memory_table(pair, *placements_of(arguments, pair), ratio_of(arguments)))
    agreement = mean_agreement(traces)
    console.print(show.policy_table(rows, num_traces=len(traces), agreement=agreement))
    sweeps = _sweeps(arguments, console, quantities, machine, traces, pair)
    for each in sweeps:
        console.print(show.sweep_table(each))
    if arguments.plot is not None:
        draw_sweeps(sweeps, arguments.plot, title=f"predicted: {machine.name}")
        console.print(f"written to {arguments.plot}", highlight=False, soft_wrap=True)
    if arguments.json is not None:
        document = _document(machine, traces, rows, sweeps)
        _write(arguments.json, json.dumps(document, indent=1) + "\n")
        console.print(f"written to {arguments.json}", highlight=False, soft_wrap=True)
    return 0


def _quantities(arguments: argparse.Namespace) -> list[Quantity]:
    names = [name.strip() for name in arguments.sweep.split(",") if name.strip()]
    chosen = [quantity for quantity in QUANTITIES if quantity in names]
    if unknown := sorted(set(names) - set(QUANTITIES)):
        raise InvalidRequestError(f"--sweep: {unknown[0]!r} is none of {', '.join(QUANTITIES)}")
    if arguments.plot is not None:
        if not chosen:
            raise InvalidRequestError(f"--plot draws sweeps: add --sweep {','.join(QUANTITIES)}")
        if arguments.plot.suffix.lower() != ".svg":
            raise InvalidRequestError(f"--plot is {arguments.plot}; its name must end in .svg")
    if "acceptance" in chosen and arguments.traces is not None:
        raise InvalidRequestError("--sweep acceptance draws its answers; leave --traces out")
    for option in ("plot", "json"):
        path = getattr(arguments, option)
        if path is not None and not path.parent.is_dir():
            raise InvalidRequestError(f"--{option}: there is no folder {path.parent}")
    return chosen


def _sweeps(
    arguments: argparse.Namespace,
    console: Console,
    quantities: Sequence[Quantity],
    machine: Machine,
    traces: list[Trace],
    pair: ModelPair | None,
) -> list[Sweep]:
    if not quantities:
        return []
    draw: Callable[[float], list[Trace]] = partial(drawn_of, arguments, pair)
    total = sum(len(VALUES[quantity]) for quantity in quantities)
    with show.progress_bar(console) as progress:
        task = progress.add_task("sweeps", total=total)
        return [
            sweep(
                quantity,
                machine,
                policies=parse_policies(arguments.policies),
                traces_at=draw if quantity == "acceptance" else lambda _: traces,
                acceptance=mean_agreement(traces),
                advance=lambda: progress.advance(task),
            )
            for quantity in quantities
        ]


def _document(
    machine: Machine, traces: Sequence[Trace], rows: Sequence[Row], sweeps: Sequence[Sweep]
) -> dict[str, object]:
    return {
        "machine": dataclasses.asdict(machine),
        "num_traces": len(traces),
        "agreement": mean_agreement(traces),
        "policies": [show.row_figures(row) for row in rows],
        "sweeps": [
            {
                "quantity": each.quantity,
                "points": [dataclasses.asdict(point) for point in each.points],
            }
            for each in sweeps
        ],
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from None
