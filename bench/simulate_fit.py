"""Fits the simulator on one policy and half of the clips, and predicts all the rest.

    python -m bench.agreement                         agreement traces, from the models alone
    python -m bench.calibrate                         steps by rows, alone and beside each other
    python -m bench.round_time --systems target-only,serial       others' work on the draft's core
    python -m bench.simulate_fit bench/out/short.json --calibration bench/out/calibration.json
                                 --rounds bench/out/round_time.json

The even clips under one policy and its baseline, target-only, are learnt from, and the decode time
of the odd clips is predicted under every policy that was measured. Serial decoding, at all of its
block lengths, shows forwards of 4 to 31 rows as they are in a service, and in its rounds how much
gateway and client work on the draft's core. Beside each prediction stands the ideal: the same step
times without transport, messages and scheduling; efficiency is measured speed over that. Of several
files, the same measurement repeated, the mean counts, and the noise is told: how far single runs of
the odd clips are from their mean.
Publish with `python -m bench.simulator_page`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.agreement import AGREEMENT
from bench.calibration import Calibration, read_calibrations
from bench.core_work import CoreWork, read_core_work
from bench.environment import ROOT
from bench.fitting import fit
from bench.repeats import all_records, run_noise
from bench.sums import recorded, replayed
from bench.systems import TARGET_ONLY, policy_of
from hippo.benchmark.tables import progress_bar
from hippo.errors import InvalidRequestError
from hippo.simulation.machine import Machine
from hippo.simulation.traces import Trace, read_traces

_GOAL = 5.0  # percent
_SEEDS = 5  # of a prediction: which of two comes first is chance where they nearly meet
BUNDLED = ROOT / "hippo/simulation/bundled.json"

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One policy on the clips that were not learnt from; times in milliseconds a token."""

    system: str
    is_learnt: bool  # the fitted policy or its baseline, on other clips
    measured: float
    predicted: float
    ideal: float
    noise_percent: float | None = None  # of a single run's measurement; None for one run alone

    @property
    def error_percent(self) -> float:
        """Predicted over measured, less one."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def efficiency(self) -> float:
        """Measured speed over the ideal's."""
        return self.ideal / self.measured


def main(argv: Sequence[str] | None = None) -> None:
    """Fits, prints tables and writes JSON."""
    args = _parse(argv)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in args.records]
    document, console, results = documents[0], Console(), []
    runs = [run for run in document["runs"] if _is_fitting(run, args)]
    if not runs:
        raise SystemExit(f"{args.records[0]} has no greedy run of {args.kind} prompts to fit")
    with progress_bar(console) as progress:
        for run in progress.track(runs, description="fitting"):
            try:
                traces = traces_of(args.traces, run["kind"], run["dtype"])
                calibration = work = None
                if args.calibration:
                    calibration = read_calibrations(args.calibration, run["dtype"])
                if args.rounds:
                    work = read_core_work(args.rounds, run["dtype"], args.system)
                repeats = [
                    other["records"]
                    for each in documents
                    for other in each["runs"]
                    if _is_fitting(other, args) and other["dtype"] == run["dtype"]
                ]
                results.append(predict(repeats, traces, args.system, run, calibration, work))
            except (InvalidRequestError, ValueError) as error:
                raise SystemExit(f"{run['kind']}, {run['dtype']}: {error}") from None
    for result in results:
        console.print(_table(result, args.system))
    command = " ".join(f"bench/out/{path.name}" for path in args.records)
    for option, paths in (("calibration", args.calibration), ("rounds", args.rounds)):
        if paths:
            command += "".join([f" --{option}", *(f" bench/out/{path.name}" for path in paths)])
    found = {
        "command": f"python -m bench.simulate_fit {command} --system '{args.system}'",
        "records": {"command": document["command"], "environment": document["environment"]},
        "system": args.system,
        "runs": results,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.bundled:
        best = next(result for result in results if result["dtype"] == args.bundled)
        BUNDLED.write_text(json.dumps(best["machine"], indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {args.out}")


def predict(
    repeats: Sequence[Records],
    traces: Mapping[str, Trace],
    system: str,
    facts: Mapping[str, Any],
    calibration: Calibration | None = None,
    work: CoreWork | None = None,
) -> dict[str, Any]:
    """Fits ``system`` on the even clips of a run and predicts every system on the odd ones.

    ``system`` is one such as "vpsd γ=7", or a policy such as "serial": all of its block lengths.
    ``repeats`` are the records of one measurement or of several that repeat it; ``facts`` its kind
    and dtype. Raises ValueError when the run has no such system, or no trace fits an answer.
    """
    by_system: dict[str, list[Mapping[str, Any]]] = {}
    for record in all_records(repeats):
        by_system.setdefault(record["system"], []).append(record)
    learnt_systems = [each for each in by_system if system in (each, policy_of(each).name)]
    if not learnt_systems:
        raise ValueError(f"no records of {system!r}; there are {', '.join(by_system)}")
    answers = [record for each in learnt_systems for record in by_system[each]]
    clips = sorted({record["clip"] for record in answers})
    learnt, held_out = set(clips[::2]), set(clips[1::2])
    asked = _traces_for({record["clip"]: record for record in answers}, traces)
    own = [record for record in answers if record["clip"] in learnt]
    alone = [record for record in by_system[TARGET_ONLY] if record["clip"] in learnt]
    name = f"the bundled pair, {facts['kind']} prompts, {facts['dtype']}"
    fitted = fit(own, alone, asked, name=name, calibration=calibration, work=work)
    predictions = []
    for each, records in by_system.items():
        rest = [record for record in records if record["clip"] in held_out]
        is_learnt = each == TARGET_ONLY or each in learnt_systems
        prediction = _prediction(each, rest, asked, fitted.machine, is_learnt=is_learnt)
        noise = run_noise(repeats, each, held_out)
        predictions.append(replace(prediction, noise_percent=noise))
    return {
        "kind": facts["kind"],
        "dtype": facts["dtype"],
        "num_repeats": len(repeats),
        "num_learnt": len(learnt),
        "num_held_out": len(held_out),
        "misfit": fitted.misfit,
        "machine": fitted.machine.as_dict(),
        "predictions": [
            {**asdict(each), "error_percent": each.error_percent, "efficiency": each.efficiency}
            for each in predictions
        ],
    }


def traces_of(path: Path, kind: str, dtype: str) -> dict[str, Trace]:
    """The traces of ``python -m bench.agreement`` by clip; ValueError when there are none."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {}
    for line, trace in zip(lines, read_traces(path), strict=True):
        if (line["kind"], line["dtype"]) == (kind, dtype):
            found[line["clip"]] = trace
    if not found:
        raise ValueError(f"{path} has no traces of these: run python -m bench.agreement")
    return found


def _traces_for(
    records: Mapping[str, Mapping[str, Any]], traces: Mapping[str, Trace]
) -> list[Trace]:
    """Those of the records' clips, in their order; ValueError when one is not of its answer."""
    chosen = []
    for clip, record in sorted(records.items()):
        trace = traces.get(clip)
        if trace is None or len(trace.agrees) != record["num_tokens"]:
            raise ValueError(
                f"no trace of {record['num_tokens']} tokens for {clip}: run python -m "
                "bench.agreement with the models that were measured"
            )
        chosen.append(trace)
    return chosen


def _prediction(
    system: str, records: Records, asked: Sequence[Trace], machine: Machine, *, is_learnt: bool
) -> Prediction:
    policy, measured = policy_of(system), recorded(records)
    counted = {record["clip"] for record in records}

    def ms_per_token(on: Machine) -> float:
        runs = [replayed(policy, asked, on, counted=counted, seed=seed) for seed in range(_SEEDS)]
        return sum(run.decode for run in runs) / sum(run.num_tokens for run in runs)

    return Prediction(
        system=system,
        is_learnt=is_learnt,
        measured=measured.decode / measured.num_tokens,
        predicted=ms_per_token(machine),
        ideal=ms_per_token(machine.ideal()),
    )


def _is_fitting(run: Mapping[str, Any], args: argparse.Namespace) -> bool:
    return (
        run["kind"] == args.kind
        and "rival" not in run
        and run["temperature"] == 0
        and run["draft"] != "random"
        and (not args.dtypes or run["dtype"] in args.dtypes.split(","))
    )


def _table(result: Mapping[str, Any], system: str) -> Table:
    errors = [abs(each["error_percent"]) for each in result["predictions"]]
    within = sum(error <= _GOAL for error in errors)
    table = Table(
        title=f"{result['kind']} prompts, {result['dtype']}: fitted on {system}, "
        f"{result['num_learnt']} clips; the other {result['num_held_out']} predicted",
        caption=f"{within} of {len(errors)} within {_GOAL:g} %; ms a token",
    )
    for column in ("policy", "measured", "noise %", "predicted", "error %", "ideal", "efficiency"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in result["predictions"]:
        is_off = abs(each["error_percent"]) > _GOAL
        table.add_row(
            each["system"] + (" (learnt)" if each["is_learnt"] else ""),
            f"{each['measured']:.3f}",
            "-" if each["noise_percent"] is None else f"{each['noise_percent']:.1f}",
            f"{each['predicted']:.3f}",
            f"{each['error_percent']:+.1f}",
            f"{each['ideal']:.3f}",
            f"{each['efficiency']:.0%}",
            style="red" if is_off else None,
        )
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate_fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("records", type=Path, nargs="+", help="what python -m bench wrote; several: repeats")
    add("--calibration", type=Path, nargs="+", default=[], help="what bench.calibrate wrote")
    add("--rounds", type=Path, nargs="+", default=[], help="what bench.round_time wrote")
    add("--traces", type=Path, default=AGREEMENT, help="what python -m bench.agreement wrote")
    add(
        "--system",
        default="serial",
        help="the policy to learn from, such as 'vpsd γ=7'; without γ at all block lengths "
        "(default: %(default)s)",
    )
    add("--kind", default="short", help="short or long (default: short)")
    add("--dtypes", default="", help="such as float32,float16 (default: all there are)")
    add("--bundled", metavar="DTYPE", help="make its machine the default of hippo simulate")
    add("--out", type=Path, default=ROOT / "bench/out/fit.json")
    args = parser.parse_args(argv)
    needed = [(path, "bench") for path in args.records] + [(args.traces, "bench.agreement")]
    needed += [(path, "bench.calibrate") for path in args.calibration]
    needed += [(path, "bench.round_time") for path in args.rounds]
    for path, maker in needed:
        if not path.exists():
            raise SystemExit(f"there is no {path}: run python -m {maker} first")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
