"""What it could gain that the idle draft prepares corrections: ``python -m bench.corrections``.

First what the recorded traces say (``python -m bench.agreement --num-clips 60``): how often the
target's correction is the draft's second choice, and how uncertain the draft was there beside the
other places that were open. Then the answers again in virtual time, with corrections prepared at
the least certain places whenever the draft idles (:mod:`hippo.simulation.corrections`), at best and
if steps have to wait for it: the bundled pair on those traces, the papers' pairs on drawn ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.agreement import AGREEMENT
from bench.environment import ROOT
from hippo.benchmark.tables import progress_bar
from hippo.cli.simulate_options import bundled_machine
from hippo.simulation.corrections import Preparing
from hippo.simulation.hardware import GPUS, Placement
from hippo.simulation.machine import Machine
from hippo.simulation.pairs import PAIRS, pair_machine
from hippo.simulation.replay import parse_policies, replay_all
from hippo.simulation.traces import Trace, agreement_of_run_length, drawn_traces, read_traces

_OPEN = (8, 16, 32)  # places, half of them behind the wrong one
_RATIO = 0.9
_DISTINCT = "qwen-7b-72b,qwen-7b-32b,qwen-3b-7b,llava-0.5b-7b"


def main(argv: Sequence[str] | None = None) -> None:
    """Counts, replays, prints tables and writes JSON."""
    args = _parse(argv)
    console, most = Console(), [int(part) for part in args.most.split(",")]
    traces = [trace for trace in read_traces(args.traces) if trace.words is not None]
    counted = count_seconds(traces)
    setups = [("the bundled pair", bundled_machine(), traces, 1.0)]
    for name in filter(None, args.pairs.split(",")):
        for length in args.run_lengths:
            machine, drawn = _paper(name, length, args.num_traces)
            title = f"{PAIRS[name].title}, run length {length:g}"
            setups += [(title, machine, drawn, share) for share in args.second_choice]
    found = []
    with progress_bar(console) as progress:
        for title, machine, chosen, share in progress.track(setups, description="replaying"):
            found += gains(title, machine, chosen, share, policies=args.policies, most=most)
    console.print(seconds_table(counted))
    console.print(gains_table(found, most))
    document = {
        "command": f"python -m bench.corrections {' '.join(argv or [])}".strip(),
        "seconds": counted,
        "gains": found,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {args.out}")


def count_seconds(traces: Sequence[Trace]) -> dict[str, Any]:
    """Wrong draft tokens, those whose second choice is right, and by number of open places how
    often the wrong one was the least certain, among the two least certain, the four.

    Open are places of the run up to half before the wrong one and half behind it.
    """
    num_wrong = num_right = num_tokens = 0
    among: dict[int, list[int]] = {count: [0, 0, 0] for count in _OPEN}
    for trace in traces:
        words, begin = trace.words, 0
        if words is None or not words.margins:
            continue
        num_tokens += len(words.token_ids)
        for place, token_id in enumerate(words.token_ids):
            if words.draft_ids[place] == token_id:
                continue
            num_wrong += 1
            num_right += words.second_ids[place] == token_id
            for count, ranks in among.items():
                before = words.margins[max(begin, place - count // 2 + 1) : place]
                behind = words.branch_margins.get(place, ())[: count // 2]
                rank = sum(margin < words.margins[place] for margin in (*before, *behind))
                for k, limit in enumerate((1, 2, 4)):
                    ranks[k] += rank < limit
            begin = place + 1
    return {
        "num_tokens": num_tokens,
        "num_wrong": num_wrong,
        "num_second_right": num_right,
        "least_certain": {str(count): ranks for count, ranks in among.items()},
    }


def gains(
    title: str,
    machine: Machine,
    traces: Sequence[Trace],
    second_choice: float,
    *,
    policies: str,
    most: Sequence[int],
) -> list[dict[str, Any]]:
    """A line a policy: decode time off, and what each number of corrections gains, in percent."""
    lines = []
    for policy in parse_policies(policies):
        off = replay_all(policy, traces, machine)
        line: dict[str, Any] = {
            "setup": title,
            "second_choice": second_choice,
            "policy": policy.title,
            "ms_per_token": off.ms_per_token,
            "target_waits": off.target_wait_ns / off.decode_ns,
        }
        for count in most:
            for name in ("gain", "held_up"):
                preparing = Preparing(count, second_choice, is_held_up=name == "held_up")
                found = replay_all(policy, traces, machine, preparing)
                line[f"{name}_{count}"] = 100 * (off.decode_ns / found.decode_ns - 1)
                line[f"{name}_{count}_ready"] = found.num_ready / max(found.num_rejections, 1)
        lines.append(line)
    return lines


def seconds_table(counted: dict[str, Any]) -> Table:
    """How often a prepared correction would have been the right one."""
    wrong = counted["num_wrong"] or 1
    table = Table(
        title=f"{counted['num_wrong']} wrong draft tokens of {counted['num_tokens']}; the second "
        f"choice is right at {counted['num_second_right'] / wrong:.0%} of them",
        title_justify="left",
    )
    for column in ("open places", "the least certain", "of the 2", "of the 4 least certain"):
        table.add_column(column, justify="right")
    for count, ranks in counted["least_certain"].items():
        table.add_row(count, *(f"{rank / wrong:.0%}" for rank in ranks))
    return table


def gains_table(found: Sequence[dict[str, Any]], most: Sequence[int]) -> Table:
    """Predicted gains of decoding speed."""
    table = Table(
        title="predicted gain in percent, at best / if steps wait for it (rejections ready)"
    )
    for column in ("set-up", "second\nright", "policy", "ms a\ntoken", "target\nwaits"):
        table.add_column(column, justify="left" if column in ("set-up", "policy") else "right")
    for count in most:
        table.add_column(f"{count} prepared", justify="right", no_wrap=True)
    for line in found:
        table.add_row(
            line["setup"],
            "recorded" if line["second_choice"] == 1 else f"{line['second_choice']:.0%}",
            line["policy"],
            f"{line['ms_per_token']:.3f}",
            f"{line['target_waits']:.0%}",
            *(
                f"{line[f'gain_{n}']:+.1f} / {line[f'held_up_{n}']:+.1f} "
                f"({line[f'gain_{n}_ready']:.0%})"
                for n in most
            ),
        )
    return table


def _paper(name: str, run_length: float, num_traces: int) -> tuple[Machine, list[Trace]]:
    pair, gpu = PAIRS[name], GPUS["h200"]
    target = Placement(gpu=gpu, num_gpus=pair.num_target_gpus)
    machine = pair_machine(pair, target=target, draft=Placement(gpu=gpu), ratio=_RATIO)
    traces = drawn_traces(
        agreement=agreement_of_run_length(run_length),
        burstiness=0.5,
        num_traces=num_traces,
        num_tokens=256,
        num_prompt_tokens=pair.num_prompt_tokens,
        num_draft_prompt_tokens=pair.num_draft_tokens(_RATIO),
    )
    return machine, traces


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.corrections",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--traces", type=Path, default=AGREEMENT, help="what python -m bench.agreement wrote")
    add("--policies", default="adaptive,vpsd:7")
    add("--most", default="1,4", help="corrections prepared at a time (default: %(default)s)")
    add("--pairs", default=_DISTINCT, help=f"of {', '.join(PAIRS)}; empty: none")
    add("--run-lengths", type=float, nargs="+", default=[4.0, 8.0], help="of the drawn answers")
    add("--num-traces", type=int, default=24, help="answers drawn for a pair")
    add("--second-choice", type=float, nargs="+", default=[0.6], help="shares assumed there")
    add("--out", type=Path, default=ROOT / "bench/out/corrections.json")
    args = parser.parse_args(argv)
    if not args.traces.exists():
        raise SystemExit(f"there is no {args.traces}: run python -m bench.agreement first")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
