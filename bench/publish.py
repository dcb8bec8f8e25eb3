"""Puts measured figures where people read them: docs/results.md, the picture, README's table.

    python -m bench.publish bench/out/bench.json

Nothing in those places is typed by hand; the JSON itself is kept as docs/results.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.systems import TARGET_ONLY
from hippo.benchmark.plots import draw_speedups
from hippo.benchmark.tables import interval, number

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the benchmark's JSON and rewrites the three places."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, nargs="+", help="files that `python -m bench` wrote")
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.result]
    slim = [_without_records(result) for result in results]
    (ROOT / "docs/results.json").write_text(json.dumps(slim, indent=1) + "\n", encoding="utf-8")
    body = "\n\n".join(_section(result) for result in results)
    replace_measured(ROOT / "docs/results.md", body)
    picture = _fastest_short_run(results)
    replace_measured(ROOT / "README.md", _readme_lines(picture))
    draw_speedups(picture["summary"], ROOT / "docs/speedup.svg", title=_title(picture))


def _fastest_short_run(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The greedy run on short prompts in the dtype in which target-only is fastest."""
    runs = [
        run
        for result in results
        for run in result["runs"]
        if run["kind"] == "short"
        and "rival" not in run
        and run["temperature"] == 0
        and run["draft"] != "random"
    ]
    if not runs:
        raise SystemExit("no greedy run on short prompts in these results")
    return min(runs, key=lambda run: float(_row(run, TARGET_ONLY)["decode_ms_per_token"]))


def _row(run: dict[str, Any], system: str) -> dict[str, Any]:
    return next(row for row in run["summary"] if row["system"] == system)


def _title(run: dict[str, Any]) -> str:
    num_clips = run["summary"][0]["num_clips"]
    return f"{run['kind']} prompts, {run['dtype']}, T={run['temperature']:g}, {num_clips} clips"


def _readme_lines(run: dict[str, Any]) -> str:
    adaptive = _row(run, "adaptive")
    decode, total = adaptive["decode_speedup"], adaptive["end_to_end_speedup"]
    return (
        f"Measured on the bundled pair ({_title(run)}; one CPU core a model): adaptive decodes "
        f"**{decode['mean']:.2f}×** as fast as the target alone "
        f"[{decode['low']:.2f}, {decode['high']:.2f}], end to end **{total['mean']:.2f}×** "
        f"[{total['low']:.2f}, {total['high']:.2f}], with {adaptive['num_equal']} of "
        f"{adaptive['num_answers']} answers equal token for token. All figures, and the command "
        "beside each: [docs/results.md](docs/results.md)."
    )


def environment_line(environment: Mapping[str, Any]) -> str:
    """When, from which commit and on what a result was measured."""
    return f"{environment['time']}, commit `{environment['commit']}`, {machine_line(environment)}"


def machine_line(environment: Mapping[str, Any]) -> str:
    """On what a result was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['cpu']}, {environment['num_cores_machine']} cores, "
        f"Python {environment['python']}, {versions}."
    )


def _section(result: dict[str, Any]) -> str:
    lines = [f"## `{result['command'].strip()}`", "", environment_line(result["environment"])]
    for run in result["runs"]:
        lines += [
            "",
            *(_rival_lines(run) if "records" in run and "summary" not in run else _lines(run)),
        ]
    return "\n".join(lines)


def _lines(run: dict[str, Any]) -> list[str]:
    name = f"rival: target-only with {run['rival']}, " if "rival" in run else ""
    if run.get("draft") == "random":
        name = "a draft with random weights: "
    pruning = run["pruning"]
    pruned = pruning["strategy"] + (
        "" if pruning["strategy"] in ("none", "blind") else f", {pruning['ratio']:.0%} pruned"
    )
    head = (
        "| system | decode | slowest clip | end to end | ms/token | TTFT ms | tokens/forward "
        "| run length | acceptance | target waits ms | dropped | transport ms/round "
        "| step ms, target / draft | equal |"
    )
    lines = [f"### {name}{_title(run)}, draft sees: {pruned}", "", head, "|---" * 14 + "|"]
    for row in run["summary"]:
        cells = [
            row["system"],
            interval(row["decode_speedup"]),
            number(row["decode_speedup"]["minimum"], ".2f"),
            interval(row["end_to_end_speedup"]),
            f"{row['decode_ms_per_token']:.2f}",
            f"{row['ttft_ms']:.0f}",
            number(row["mean_tokens_per_forward"], ".2f"),
            number(row["mean_run_length"], ".1f"),
            number(row["acceptance_rate"], ".3f"),
            number(row["target_wait_ms"], ".0f"),
            number(row["dropped_tokens"], ".0f"),
            number(row["transport_ms_per_round"], ".2f"),
            f"{number(row['target_step_ms'], '.2f')} / {number(row['draft_step_ms'], '.2f')}",
            f"{row['num_equal']}/{row['num_answers']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if run.get("differences") == []:
        lines += ["", "No answer differs from target-only's, so there is no margin to report."]
    if found := run.get("differences"):
        lines += ["", "First differences from target-only, and the margin of its best logit there:"]
        lines += ["", "| clip | system | index | margin |", "|---|---|---|---|"]
        lines += [
            f"| {each['clip']} | {each['system']} | {each['index']} | {each['margin']:.4f} |"
            for each in found
        ]
    return lines


def _rival_lines(run: dict[str, Any]) -> list[str]:
    names = list(run["records"][0]["seconds"])
    lines = [f"### rival: {run['rival']}, {run['kind']} prompts, {run['dtype']}", ""]
    lines += ["| system | request to last token, ms a clip | ms a token |", "|---|---|---|"]
    for name in names:
        seconds = [record["seconds"][name] for record in run["records"]]
        tokens = sum(record["num_tokens"] for record in run["records"])
        lines.append(
            f"| {name} | {1e3 * sum(seconds) / len(seconds):.0f} "
            f"| {1e3 * sum(seconds) / tokens:.2f} |"
        )
    return lines


def _without_records(result: dict[str, Any]) -> dict[str, Any]:
    runs = [
        {key: value for key, value in run.items() if key != "records" or "summary" not in run}
        for run in result["runs"]
    ]
    return {**result, "runs": runs}


def replace_measured(path: Path, body: str) -> None:
    """Puts ``body`` between the markers of a file; raises SystemExit when it has none."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path} has no markers {BEGIN} ... {END}")
    path.write_text(pattern.sub(lambda _: f"{BEGIN}\n{body}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
