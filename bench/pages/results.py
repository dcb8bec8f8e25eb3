"""The page of results: ``python -m bench.pages.results [FILE ...]``.

Writes docs/results.md and docs/pruning.md between their markers, their plots, README's figures,
and docs/results.json with the data of the tables. FILE is the JSON of a measurement (default: all
of bench/out). Results in docs/results.json without a new file stay.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.answers.systems import TARGET_ONLY, is_preset_name
from bench.base.cells import LATENCY_COLUMNS, LEVEL_COLUMNS, LOAD_COLUMNS, cells, load_title
from bench.base.environment import ROOT
from bench.base.options import parser_of
from bench.pages.markers import rewrite
from bench.pruning.plots import draw_ratio
from bench.pruning.tables import markdown_tables
from hippo.client.tables import interval, markdown
from hippo.lab.benchmark.plots import draw_load, draw_speedups

Result = Mapping[str, Any]

PRUNING = ("services", "ratio", "ablation", "bias", "frames", "confirm")  # shown in docs/pruning.md
NAMES = (
    *("levels", "levels-again", "short", "half", "long", "random"),
    *("load", "load-bfloat16", "load-long"),
    *PRUNING,
)
_DOCS = ROOT / "docs"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the measurements and rewrites the page, the plots and README's figures."""
    parser = parser_of("bench.pages.results", __doc__)
    parser.add_argument("file", type=Path, nargs="*", help=f"named {', '.join(NAMES)}, and .json")
    files: list[Path] = parser.parse_args(argv).file
    if not files:
        out = ROOT / "bench/out"
        found = [folder / f"{name}.json" for name in NAMES for folder in (out, out / "pruning")]
        files = [path for path in found if path.exists()]
    if wrong := [path for path in files if path.stem not in NAMES]:
        raise SystemExit(f"{wrong[0]} is none of {', '.join(NAMES)}")
    kept = _DOCS / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    for path in files:
        results[path.stem] = _without_records(json.loads(path.read_text(encoding="utf-8")))
    results = {name: results[name] for name in NAMES if name in results}
    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rewrite(_DOCS / "results.md", "measured", page(results))
    rewrite(_DOCS / "pruning.md", "measured", pruning_page(results))
    draw(results, _DOCS)
    rewrite(ROOT / "README.md", "measured", readme_lines(results))


def page(results: Mapping[str, Result]) -> str:
    """The measured part of docs/results.md."""
    shown = (name for name in results if name not in PRUNING)
    return "\n\n".join(_section(name, results[name]) for name in shown)


def pruning_page(results: Mapping[str, Result]) -> str:
    """The measured part of docs/pruning.md."""
    return "\n\n".join(_section(name, results[name]) for name in PRUNING if name in results)


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """Draws the plots of the results."""
    picture = fastest_short_run(results)
    draw_speedups(picture["summary"], folder / "speedup.svg", title=_run_title(picture))
    if "load" in results:
        draw_load(results["load"]["loads"], folder / "load.svg", title=load_title(results["load"]))
    if "ratio" in results:
        draw_ratio(results["ratio"], folder / "pruning-ratio.svg")


def environment_line(environment: Result) -> str:
    """Returns time, commit and machine of a result."""
    return f"{environment['time']}, commit `{environment['commit']}`, {machine_line(environment)}"


def machine_line(environment: Result) -> str:
    """Returns the machine of a result; docs/results.json has all versions."""
    torch = environment["versions"]["torch"]
    return f"{environment['cpu']}, {environment['num_cores_machine']} cores, torch {torch}."


def fastest_short_run(results: Mapping[str, Result]) -> Any:
    """Returns the greedy run on short prompts with the fastest target-only decoding."""
    runs = [
        run
        for result in results.values()
        for run in result.get("runs", ())
        if run["kind"] == "short" and run["temperature"] == 0 and run["draft"] != "random"
    ]
    if not runs:
        raise SystemExit("no greedy run on short prompts in these results")
    return min(runs, key=lambda run: float(_row(run, TARGET_ONLY)["decode_ms_per_token"]))


def readme_lines(results: Mapping[str, Result]) -> str:
    """Returns README's table: the fastest target, and weaker drafts."""
    run = fastest_short_run(results)
    commit = next(
        result["environment"]["commit"]
        for result in results.values()
        if any(run is each for each in result.get("runs", ()))
    )
    adaptive = _row(run, "adaptive")
    bundled = [
        f"bundled, {run['dtype']}",
        f"**{interval(adaptive['decode_speedup'])}**",
        f"**{interval(adaptive['end_to_end_speedup'])}**",
        f"{adaptive['mean_tokens_per_forward']:.1f}",
    ]
    weaker, commits = _weaker(results)
    columns = ["draft", "decoding ×", "end to end ×", "tokens a pass of the target"]
    return (
        f"{markdown(columns, [bundled, *weaker])}\n\n"
        f"Speedups over the target alone ({_run_title(run)}; one CPU core a model; commit "
        f"{', '.join(dict.fromkeys([commit, *commits]))}). {adaptive['num_equal']} of "
        f"{adaptive['num_answers']} answers with the bundled draft were equal token for token. "
        "All figures, and the command beside each: [docs/results.md](docs/results.md)."
    )


def _weaker(results: Mapping[str, Result]) -> tuple[list[list[str]], list[str]]:
    """Returns rows of the drafts that agree on fewer tokens, greedily on short prompts, and the
    commits that were measured."""
    # A row that was measured again has more runs of each answer.
    rows = {
        (row["draft"], row["kind"], row["dtype"], row["temperature"]): (name, row)
        for name in ("levels", "levels-again")
        for row in results.get(name, {}).get("levels", ())
    }
    greedy = [
        (name, row)
        for key, (name, row) in rows.items()
        if key[1:] == ("short", "float32", 0.0) and row["draft"] != "bundled"
    ]
    cells = [
        [
            f"agrees on {row['agreement']:.0%} of the tokens, float32",
            interval(row["adaptive"]["decode"]),
            interval(row["end_to_end"]),
            f"{row['tokens_per_forward']:.1f}",
        ]
        for _, row in greedy
    ]
    return cells, [results[name]["environment"]["commit"] for name, _ in greedy]


def _section(name: str, result: Result) -> str:
    """Returns the heading with the command, the environment, and the tables."""
    parts = [f"## `{result['command'].strip()}`", environment_line(result["environment"])]
    if "runs" in result:
        titles: dict[str, list[list[str]]] = {}
        for run in result["runs"]:
            for title, part in _by_pruning(run):
                titles.setdefault(title, []).extend(_latency_cells(part))
        for title, rows in titles.items():
            parts += [title, markdown(("dtype, T", *LATENCY_COLUMNS), rows)]
    elif "levels" in result:
        count = result["levels"][0]["num_clips"]
        parts += [f"{count} clips for each kind of prompt."]
        parts += [markdown(tuple(LEVEL_COLUMNS), cells(LEVEL_COLUMNS, result["levels"]))]
    elif "loads" in result:
        parts += [
            f"### {load_title(result)}",
            markdown(tuple(LOAD_COLUMNS), cells(LOAD_COLUMNS, _shown_loads(result["loads"]))),
        ]
    else:
        plot = ["![agreement over ratio](pruning-ratio.svg)"] if name == "ratio" else []
        parts += [f"{result['num_clips']} held-out clips.", *plot, *markdown_tables(name, result)]
    return "\n\n".join(parts)


def _shown_loads(loads: Sequence[Result]) -> list[Result]:
    """Returns the rows of one client, of eight, and of the most; the plot has all."""
    most = max(row["num_clients"] for row in loads)
    return [row for row in loads if row["num_clients"] in (1, 8, most)]


def _row(run: Result, system: str) -> Any:
    return next(row for row in run["summary"] if row["system"] == system)


def _num_clips(run: Result) -> int:
    return int(run["summary"][0]["num_clips"])


def _run_title(run: Result) -> str:
    temperature, num_clips = run["temperature"], _num_clips(run)
    return f"{run['kind']} prompts, {run['dtype']}, T={temperature:g}, {num_clips} clips"


def _by_pruning(run: Result) -> Iterator[tuple[str, Result]]:
    """Yields title and rows of the systems with the run's pruning, and then of the presets."""
    pruned: str = run["pruning"]["strategy"]
    if pruned not in ("none", "blind"):
        pruned += f", {run['pruning']['ratio']:.0%} pruned"
    for pruning, is_preset in ((pruned, False), ("each preset's own", True)):
        rows = [row for row in run["summary"] if is_preset_name(row["system"]) == is_preset]
        if rows:
            yield _latency_title(run, pruning), {**run, "summary": rows}


def _latency_title(run: Result, pruning: str) -> str:
    name = "a draft with random weights: " if run["draft"] == "random" else ""
    return f"### {name}{run['kind']} prompts, {_num_clips(run)} clips, pruning: {pruning}"


def _latency_cells(run: Result) -> list[list[str]]:
    name = f"{run['dtype']}, {run['temperature']:g}"
    return [[name, *row] for row in cells(LATENCY_COLUMNS, _at_the_best_lengths(run["summary"]))]


def _at_the_best_lengths(summary: Sequence[Result]) -> Iterator[Result]:
    """Yields a row for each policy: of several draft lengths γ, the row that decodes fastest."""
    lengths: dict[str, list[Result]] = {}
    for row in summary:
        lengths.setdefault(row["system"].partition("γ=")[0], []).append(row)
    for rows in lengths.values():
        best = max(rows, key=lambda row: float(row["decode_speedup"]["mean"]))
        yield best


def _without_records(result: Any) -> Any:
    """Returns what the tables and plots are made of."""
    runs = [
        {key: value for key, value in run.items() if key != "records"}
        for run in result.get("runs", ())
    ]
    return {**result, "runs": runs} if runs else result


if __name__ == "__main__":
    main()
