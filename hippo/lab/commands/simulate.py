"""``hippo simulate``: predicts the speed of each policy on a machine without running on it."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from hippo.lab.commands import simulate_show as show
from hippo.lab.commands.options import check_folders, write_text
from hippo.lab.commands.simulate_options import machine_of, traces_of
from hippo.lab.simulation.hardware import GPUS
from hippo.lab.simulation.pairs import PAIRS
from hippo.lab.simulation.replay import compare, parse_policies
from hippo.lab.simulation.traces import mean_agreement

HELP = "predict the speedup of each policy on a given machine"
DESCRIPTION = """\
Predicts how fast each policy decodes, by running the services' own three cores (drafter, verifier,
coordinator) and policies in virtual time. A machine says what everything takes; a trace says which
of the target's tokens the draft would have proposed. Efficiency is the predicted speed over
the ideal speed: the same step times without transport, messages and scheduling.
"""
EXAMPLES = """\
a machine (without any of these: --pair qwen-7b-72b):
  hippo simulate --pair qwen-7b-32b                     one of the papers' pairs on H200s
  hippo simulate --pair qwen-7b-72b --gpu a100 --target-gpus 4
  hippo simulate --target-ms 20 --draft-ms 4            step times that you know

agreement (without any of these: a share of 0.9):
  hippo simulate --acceptance 0.95 --burstiness 0
  hippo simulate --run-length 9                         HIPPO's M (mean accepted tokens) of 8
  hippo simulate --traces bench/out/agreement.jsonl     lines such as 110111, or JSON

what if:
  hippo simulate --pair llava-7b-72b --delay-ms 2       the services are far apart
  hippo simulate --policies adaptive,serial:best,vpsd:7 --json out.json

All is predicted. Step times of a --pair come from its bytes over the GPU's bandwidth, and from
overheads that were measured on an H200.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add("--pair", help=f"one of {', '.join(PAIRS)}")
    add("--gpu", choices=GPUS, help="of both models of a --pair (default: h200)")
    add("--target-gpus", type=int, help="GPUs that share the target of a --pair")
    add("--ratio", type=float, help="share of visual tokens pruned for its draft (default: 0.9)")
    eager = "the host launches the operations of a step one by one, as without CUDA graphs"
    add("--eager", action="store_true", default=None, help=eager)
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
    add(
        "--run-length", type=float, help="mean tokens between two rejections, the corrected one "
        "included: the papers' mean accepted tokens + 1",
    )  # fmt: skip
    add("--traces", type=Path, help="a file of agreement traces")
    add = group.add_argument
    add("--burstiness", type=float, help="0: rejections are independent; 1: they come together")
    add("--num-traces", type=int, help="answers drawn (default: 12)")
    add("--tokens", type=int, help="tokens of each (default: 256)")
    add("--seed", type=int, help="of the drawn answers (default: 0)")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--policies", default="serial:best,vpsd:best,adaptive", help="default: %(default)s")
    add("--json", type=Path, help="write all figures")


def run(arguments: argparse.Namespace) -> int:
    """Runs the simulation and prints its tables; returns the exit code."""
    console = Console()
    policies = parse_policies(arguments.policies)
    check_folders(arguments, "json")
    pair, machine = machine_of(arguments)
    traces = traces_of(arguments, pair)
    with console.status("replaying ..."):
        rows = compare(policies, traces, machine)
    console.print(show.machine_table(machine, pair))
    if pair is not None:
        console.print(show.memory_table(pair))
    agreement = mean_agreement(traces)
    console.print(show.policy_table(rows, num_traces=len(traces), agreement=agreement))
    if arguments.json is not None:
        document = {
            "machine": show.machine_figures(machine, pair),
            "num_traces": len(traces),
            "agreement": agreement,
            "policies": [show.row_figures(row) for row in rows],
        }
        write_text(arguments.json, json.dumps(document, indent=1) + "\n")
        console.print(f"written to {arguments.json}", highlight=False, soft_wrap=True)
    return 0
