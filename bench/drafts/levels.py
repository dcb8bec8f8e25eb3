"""Speedups at three levels of agreement between draft and target: ``python -m
bench.drafts.levels``.

The drafts are the bundled one and two weaker ones made from it (bench.drafts.weaker). Each answers
short and long prompts, greedily and at a temperature, in float32 and bfloat16. One run of each
answer under serial and vpsd decoding finds the best of several draft lengths. Further runs then
compare adaptive with both at these lengths, because the best of many noisy measurements is too
good.

    python -m bench.drafts.levels                    all: a hundred minutes on two idle cores
    python -m bench.drafts.levels --drafts 93% --kinds short --dtypes float32 --temperatures 0
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.answers.runs import ask_systems, bundled_pair, running_stack
from bench.answers.systems import policy_of, systems
from bench.base.cells import LEVEL_COLUMNS, cells
from bench.base.clips import Kind, held_out_clips
from bench.base.options import add_out, names, new_result, numbers, parser_of, write_result
from bench.base.tables import wide_console, wide_table
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.client.figures import spread
from hippo.client.latency import TARGET_ONLY, Record, System

_RATIO = 0.9  # share pruned on long prompts
_GAMMAS = (5, 7, 10, 15, 20, 30)  # for serial and vpsd


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes JSON."""
    args = _parse(argv)
    console = wide_console()
    result = new_result("bench.drafts.levels", argv, levels=[])
    pair = bundled_pair("float32")  # pins this process, so only once
    for draft, kind, dtype in product(args.drafts, args.kinds, args.dtypes):
        with tempfile.TemporaryDirectory() as folder:
            clips = held_out_clips(Path(folder) / "clips", kind=kind, num_clips=args.num_clips)
            model = find_draft(draft, Path(folder), kind)
            options = replace(pair, dtype=dtype, draft_model=model)
            with running_stack(options) as stack:
                for temperature in args.temperatures:
                    ask = partial(
                        ask_systems, console, stack.url, clips, temperature=temperature,
                        title=f"{draft}, {kind} prompts, {dtype}, T={temperature:g}",
                    )  # fmt: skip
                    every = _systems(kind)
                    best = best_systems(ask(every)).values()
                    compared = [each for each in every if each.name in best]
                    records = ask(compared, num_repeats=args.repeats)
                    facts = {"draft": draft, "kind": kind, "dtype": dtype}
                    sizes = {"temperature": temperature, "num_clips": len(clips)}
                    result["levels"].append({**facts, **sizes, **level(records)})
                    write_result(args.out, result)
    rows = cells(LEVEL_COLUMNS, result["levels"])
    console.print(wide_table("levels of agreement", LEVEL_COLUMNS, rows))
    console.print(f"written to {args.out}")


def best_systems(records: Sequence[Record]) -> dict[str, str]:
    """Returns for each policy the system of the highest mean decode speedup."""
    best: dict[str, str] = {}
    by_system = _by_system(records)
    for system, found in by_system.items():
        policy = policy_of(system).name
        if policy not in best or _mean(found) > _mean(by_system[best[policy]]):
            best[policy] = system
    return best


def level(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of one draft at one setting, from records of target-only, adaptive, and
    serial and vpsd at one length each. Vpsd always drafts ahead, so its answers tell on how many
    tokens draft and target agree."""
    best, by_system = best_systems(records), _by_system(records)
    adaptive, serial, vpsd = (by_system[best[name]] for name in ("adaptive", "serial", "vpsd"))

    def ratios(others: dict[str, Record]) -> list[float]:
        return [adaptive[clip].decode_speedup / others[clip].decode_speedup for clip in adaptive]

    figures = [record.figures for record in adaptive.values()]
    num_tokens = sum(record.answer.num_tokens for record in vpsd.values())
    drafted = [record for record in records if record.system != TARGET_ONLY]
    return {
        "agreement": 1 - sum(each.figures["num_rejections"] for each in vpsd.values()) / num_tokens,
        "run_length": statistics.fmean(each["mean_run_length"] for each in figures),
        "tokens_per_forward": statistics.fmean(each["mean_tokens_per_forward"] for each in figures),
        "target_only_ms": 1e3
        * statistics.fmean(
            record.answer.decode_s_per_token for record in records if record.system == TARGET_ONLY
        ),
        **{
            name: {"gamma": policy_of(best[name]).gamma, "decode": spread(_speedups(found))}
            for name, found in (("serial", serial), ("vpsd", vpsd), ("adaptive", adaptive))
        },
        "end_to_end": spread([record.end_to_end_speedup for record in adaptive.values()]),
        "first_token": spread([record.first_token_share for record in adaptive.values()]),
        "over_serial": spread(ratios(serial)),
        "over_vpsd": spread(ratios(vpsd)),
        "least_over_better": min(map(min, zip(ratios(serial), ratios(vpsd), strict=True))),
        "num_equal": sum(record.is_equal for record in drafted),
        "num_answers": len(drafted),
    }


def _by_system(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Returns the records by system, then by clip."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record.system, {})[record.clip] = record
    return found


def _speedups(records: Mapping[str, Record]) -> list[float]:
    return [record.decode_speedup for record in records.values()]


def _mean(records: Mapping[str, Record]) -> float:
    return statistics.fmean(_speedups(records))


def _systems(kind: Kind) -> list[System]:
    every = systems(*(("holistic", _RATIO) if kind == "long" else ("none", 0.0)))
    lengths = [f"{policy} γ={gamma}" for policy in ("serial", "vpsd") for gamma in _GAMMAS]
    chosen = (TARGET_ONLY, *lengths, "adaptive")
    return [system for system in every if system.name in chosen]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.drafts.levels", __doc__)
    add = parser.add_argument
    add("--drafts", type=names, default=[BUNDLED, "93%", "85%"], help=HELP)
    add("--kinds", type=names, default=["short", "long"], help="short, long")
    add("--dtypes", type=names, default=["float32", "bfloat16"])
    add("--temperatures", type=numbers, default=[0.0, 0.8])
    add("--num-clips", type=int, default=6, help="held-out clips per kind")
    add("--repeats", type=int, default=3, help="compared runs of an answer; the median one counts")
    add_out(parser, "levels.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
