"""The page of results: ``python -m bench.page [FILE ...]``.

Writes docs/results.md between its markers, its plots, README's figures, and docs/results.json with
the data of the tables. FILE is the JSON of a measurement (default: all of bench/out). Results in
docs/results.json without a new file stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.options import parser_of
from bench.pruning.plots import DRAWERS
from bench.systems import TARGET_ONLY
from hippo.benchmark.plots import draw_levels, draw_load, draw_speedups
from hippo.benchmark.tables import interval, number

Result = Mapping[str, Any]

NAMES = (
    *("levels", "servers", "short", "half", "long", "random"),
    *("load", "load-bfloat16", "load-long"),
    *("ratio", "ablation", "confirm", "services"),
)
LOAD_COLUMNS = (
    *("system", "clients", "tokens/s", "answers/s", "TTFT ms p50 / p99", "ms/token p50 / p99"),
    *("gap ms p99 / max", "acceptance", "tokens/forward", "rows/forward", "sequences/forward"),
    *("target busy (prefill)", "draft busy (prefill)", "CPU target, draft, gateway, clients"),
    "equal",
)
LATENCY_COLUMNS = (
    *("system", "decode", "slowest clip", "end to end", "ms/token", "TTFT ms", "tokens/forward"),
    *("run length", "acceptance", "target waits ms", "dropped", "transport ms/round"),
    *("step ms, target / draft", "equal"),
)
LEVEL_COLUMNS = (
    *("draft", "prompts, dtype, T", "agreement", "run length", "tokens/forward"),
    *("target-only ms/token", "serial (γ)", "vpsd (γ)", "adaptive", "end to end"),
    *("over serial", "over vpsd", "least over the better", "ideal", "of the ideal", "equal"),
)
SERVER_COLUMNS = (
    *("server", "cores of the target", "first token, ms", "ms/token", "end to end, ms"),
    *("equal text", "8 clients: tokens/s", "8 clients: first token, ms", "8 clients: ms/token"),
)
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_DOCS = ROOT / "docs"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the measurements and rewrites the page, the plots and README's figures."""
    parser = parser_of("bench.page", __doc__)
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
    replace_measured(_DOCS / "results.md", page(results))
    draw(results, _DOCS)
    replace_measured(ROOT / "README.md", readme_lines(results))


def page(results: Mapping[str, Result]) -> str:
    """The measured part of the page."""
    return "\n\n".join(_section(name, result) for name, result in results.items())


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """Draws the plots of the results."""
    picture = fastest_short_run(results)
    draw_speedups(picture["summary"], folder / "speedup.svg", title=_run_title(picture))
    if "load" in results:
        draw_load(results["load"]["loads"], folder / "load.svg", title=load_title(results["load"]))
    if "levels" in results:
        levels, simulated = results["levels"]["levels"], results["levels"]["simulated"]
        first = levels[0]
        shown = [
            row
            for row in levels
            if (row["dtype"], row["temperature"]) == (first["dtype"], first["temperature"])
        ]
        draw_levels(shown, simulated, folder / "levels.svg")
    for name, drawer in DRAWERS.items():
        if name in results:
            drawer(results[name], folder / f"pruning-{name}.svg")


def environment_line(environment: Result) -> str:
    """Returns time, commit and machine of a result."""
    return f"{environment['time']}, commit `{environment['commit']}`, {machine_line(environment)}"


def machine_line(environment: Result) -> str:
    """Returns the machine and the versions of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['cpu']}, {environment['num_cores_machine']} cores, "
        f"Python {environment['python']}, {versions}."
    )


def replace_measured(path: Path, body: str) -> None:
    """Puts ``body`` between the markers of a file. Raises SystemExit if it has none."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path} has no markers {_BEGIN} ... {_END}")
    path.write_text(pattern.sub(lambda _: f"{_BEGIN}\n{body}\n{_END}", text), encoding="utf-8")


def fastest_short_run(results: Mapping[str, Result]) -> Any:
    """Returns the greedy run on short prompts with the fastest target-only decoding."""
    runs = [
        run
        for result in results.values()
        for run in result.get("runs", ())
        if run["kind"] == "short"
        and "rival" not in run
        and run["temperature"] == 0
        and run["draft"] != "random"
    ]
    if not runs:
        raise SystemExit("no greedy run on short prompts in these results")
    return min(runs, key=lambda run: float(_row(run, TARGET_ONLY)["decode_ms_per_token"]))


def readme_lines(results: Mapping[str, Result]) -> str:
    """Returns README's text about the fastest target, and about weaker drafts."""
    run = fastest_short_run(results)
    adaptive = _row(run, "adaptive")
    decode, total = adaptive["decode_speedup"], adaptive["end_to_end_speedup"]
    return (
        f"Measured on the bundled pair ({_run_title(run)}; one CPU core a model): adaptive decodes "
        f"**{decode['mean']:.2f}×** as fast as the target alone "
        f"[{decode['low']:.2f}, {decode['high']:.2f}], end to end **{total['mean']:.2f}×** "
        f"[{total['low']:.2f}, {total['high']:.2f}], with {adaptive['num_equal']} of "
        f"{adaptive['num_answers']} answers equal token for token. A forward of the target settles "
        f"{adaptive['mean_tokens_per_forward']:.1f} tokens in the mean, and "
        f"{adaptive['mean_run_length']:.0f} tokens lie between two rejections.{_weaker(results)} "
        "All figures, and the command beside each: [docs/results.md](docs/results.md)."
    )


def _weaker(results: Mapping[str, Result]) -> str:
    """Returns a sentence on the drafts that agree on fewer tokens, greedily on short prompts."""
    rows = results.get("levels", {}).get("levels", ())
    first = rows[0] if rows else {}
    setting = ("kind", "dtype", "temperature")
    parts = [
        f"{row['agreement']:.0%} of the tokens **{row['adaptive']['decode']['mean']:.2f}×** "
        f"(end to end {row['end_to_end']['mean']:.2f}×; {row['tokens_per_forward']:.1f} tokens a "
        "forward)"
        for row in rows
        if row["draft"] != first["draft"] and all(row[each] == first[each] for each in setting)
    ]
    if not parts:
        return ""
    return f" With a weaker draft in {first['dtype']}: on {', on '.join(parts)}."


def load_title(result: Result) -> str:
    """Returns the title of a load measurement."""
    count = result.get("questions_per_clip", 1)
    questions = f"{count} questions a clip, " if count > 1 else ""
    prompts = f"{result['kind']} prompts, {result['dtype']}, T={result['temperature']:g}"
    return f"{prompts}, {questions}closed loop on two cores"


def load_rows(result: Result) -> Iterator[list[str]]:
    """Yields a row, as in ``LOAD_COLUMNS``, for each system and number of clients."""
    for line in result["loads"]:
        services = line["services"]
        target, draft, cpu = services["target"], services["draft"], services["cpu"]
        gaps = line["gap_ms"]
        low, high = line["tokens_per_s_range"]
        spread = f" [{low:.0f}, {high:.0f}]" if line["num_runs"] > 1 else ""
        yield [
            line["system"],
            str(line["num_clients"]),
            f"{line['tokens_per_s']:.0f}{spread}",
            f"{line['answers_per_s']:.1f}",
            f"{line['ttft_ms']['p50']:.0f} / {line['ttft_ms']['p99']:.0f}",
            f"{line['tpot_ms']['p50']:.2f} / {line['tpot_ms']['p99']:.2f}",
            "-" if gaps is None else f"{gaps['p99']:.0f} / {gaps['max']:.0f}",
            number(line["acceptance_rate"], ".3f"),
            f"{line['tokens_per_forward']:.2f}",
            number(target["rows_per_forward"], ".1f"),
            number(target["sequences_per_forward"], ".1f"),
            f"{target['busy']:.0%} ({target['prefill']:.0%})",
            f"{draft['busy']:.0%} ({draft['prefill']:.0%})",
            " ".join(f"{cpu[name]:.2f}" for name in ("target", "draft", "gateway", "clients")),
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def latency_rows(summary: Iterable[Result]) -> Iterator[list[str]]:
    """Yields a row, as in ``LATENCY_COLUMNS``, for each system."""
    for row in summary:
        yield [
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


def level_rows(result: Result) -> Iterator[list[str]]:
    """Yields a row, as in ``LEVEL_COLUMNS``, for each draft and setting."""
    for line in result["levels"]:
        yield [
            line["draft"],
            f"{line['kind']}, {line['dtype']}, {line['temperature']:g}",
            f"{line['agreement']:.1%}",
            f"{line['run_length']:.1f}",
            f"{line['tokens_per_forward']:.2f}",
            f"{line['target_only_ms']:.2f}",
            *(
                f"{line[name]['decode']['mean']:.2f} ({line[name]['gamma']})"
                for name in ("serial", "vpsd")
            ),
            interval(line["adaptive"]["decode"]),
            f"{line['end_to_end']['mean']:.2f}",
            interval(line["over_serial"]),
            interval(line["over_vpsd"]),
            f"{line['least_over_better']:.2f}",
            f"{line['ideal']:.2f}",
            f"{line['of_ideal']:.0%}",
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def server_rows(result: Result) -> Iterator[list[str]]:
    """Yields a row, as in ``SERVER_COLUMNS``, for each server."""
    for line in result["servers"]:
        yield [
            line["name"],
            line["devices"],
            f"{line['ttft_ms']['mean']:.0f}",
            interval(line["tpot_ms"]),
            f"{line['end_to_end_ms']['mean']:.0f}",
            f"{line['num_equal']}/{result['num_clips']}",
            f"{line['loaded_tokens_per_s']:.0f}",
            f"{line['loaded_ttft_ms']:.0f}",
            f"{line['loaded_tpot_ms']:.2f}",
        ]


def _section(name: str, result: Result) -> str:
    """Returns the heading with the command, the environment, and the tables."""
    parts = [f"## `{result['command'].strip()}`", environment_line(result["environment"])]
    if "runs" in result:
        titles: dict[str, list[list[str]]] = {}
        for run in result["runs"]:
            if "summary" in run:
                titles.setdefault(_latency_title(run), []).extend(_latency_cells(run))
        for title, rows in titles.items():
            parts += [title, _markdown(("dtype, T", *LATENCY_COLUMNS), rows)]
        parts += _differences(result["runs"]) + _rivals(result["runs"])
    elif "levels" in result:
        count = result["levels"][0]["num_clips"]
        parts += [
            f"{count} clips for each kind of prompt.",
            "![Speedup over agreement](levels.svg)",
        ]
        parts += [_markdown(LEVEL_COLUMNS, list(level_rows(result)))]
    elif "servers" in result:
        title = (
            f"One client, then eight; {result['num_clips']} short clips, {result['dtype']}, T=0."
        )
        parts += [title, _markdown(SERVER_COLUMNS, list(server_rows(result)))]
    elif "loads" in result:
        parts += [f"### {load_title(result)}", _markdown(LOAD_COLUMNS, list(load_rows(result)))]
    else:
        parts += [f"{result['num_clips']} held-out clips.", f"![{name}](pruning-{name}.svg)"]
        parts += _services(result) if name == "services" else _agreement(name, result)
    return "\n\n".join(parts)


def _row(run: Result, system: str) -> Any:
    return next(row for row in run["summary"] if row["system"] == system)


def _num_clips(run: Result) -> int:
    return int(run["summary"][0]["num_clips"])


def _run_title(run: Result) -> str:
    temperature, num_clips = run["temperature"], _num_clips(run)
    return f"{run['kind']} prompts, {run['dtype']}, T={temperature:g}, {num_clips} clips"


def _latency_title(run: Result) -> str:
    name = f"rival: target-only with {run['rival']}, " if "rival" in run else ""
    if run.get("draft") == "random":
        name = "a draft with random weights: "
    pruned: str = run["pruning"]["strategy"]
    if pruned not in ("none", "blind"):
        pruned += f", {run['pruning']['ratio']:.0%} pruned"
    return f"### {name}{run['kind']} prompts, {_num_clips(run)} clips, pruning: {pruned}"


def _latency_cells(run: Result) -> list[list[str]]:
    name = f"{run['dtype']}, {run['temperature']:g}"
    return [[name, *cells] for cells in latency_rows(_at_the_best_lengths(run["summary"]))]


def _differences(runs: Sequence[Result]) -> list[str]:
    cells = [
        [run["dtype"], each["clip"], each["system"], str(each["index"]), f"{each['margin']:.4f}"]
        for run in runs
        for each in run.get("differences") or ()
    ]
    if not cells:
        return []
    title = "First differences from target-only, and the margin of its best logit there:"
    return [title, _markdown(("dtype", "clip", "system", "index", "margin"), cells)]


def _at_the_best_lengths(summary: Sequence[Result]) -> Iterator[Result]:
    """Yields one row per policy: of several draft lengths γ the one that decodes fastest."""
    lengths: dict[str, list[Result]] = {}
    for row in summary:
        lengths.setdefault(row["system"].partition("γ=")[0], []).append(row)
    for rows in lengths.values():
        best = max(rows, key=lambda row: float(row["decode_speedup"]["mean"]))
        gammas = ", ".join(row["system"].partition("γ=")[2] for row in rows)
        of_several = f" (best of {gammas})" if len(rows) > 1 else ""
        yield {**best, "system": f"{best['system']}{of_several}"}


def _rivals(runs: Sequence[Result]) -> list[str]:
    rows = []
    for run in runs:
        if "summary" in run:
            continue
        name = f"{run['rival']}, {run['kind']} prompts, {run['dtype']}"
        tokens = sum(record["num_tokens"] for record in run["records"])
        for system in run["records"][0]["seconds"]:
            total_ms = 1e3 * sum(record["seconds"][system] for record in run["records"])
            clip_ms = f"{total_ms / len(run['records']):.0f}"
            rows.append([name, system, clip_ms, f"{total_ms / tokens:.2f}"])
    head = ("rival", "system", "request to last token, ms a clip", "ms a token")
    return ["### Rivals", _markdown(head, rows)] if rows else []


def _agreement(name: str, result: Result) -> list[str]:
    """Returns the table of agreement: a row per strategy and a column per ratio, or for
    ``ablation`` a row per variant, without the variants that equal the first row."""
    if name != "ablation":
        title = "Agreement in percent, and in brackets its difference from seeing every token:"
        cells = {
            row[
                "label"
            ]: f"{percent(row['agreement'])} ({percent(row['minus none'], is_signed=True)})"
            for row in result["rows"]
        }
        return [title, _by_ratio(cells)]
    keys = (key for key in result["rows"][0] if key.startswith("minus "))
    reference = next(key for key in keys if key != "minus none")
    shown = [
        row
        for row in result["rows"]
        if row["label"] == reference.removeprefix("minus ") or any(row[reference].values())
    ]
    rows = [
        [
            row["label"],
            percent(row["agreement"]),
            percent(row["content_agreement"]),
            percent(row[reference], is_signed=True),
        ]
        for row in shown
    ]
    head = ("choice of visual tokens", "agreement, %", "content words, %", "minus the first row")
    return [_markdown(head, rows)]


def _services(result: Result) -> list[str]:
    rows = [row for row in result["rows"] if row["system"] != TARGET_ONLY]
    num_equal = sum(row["num_equal"] for row in rows)
    title = (
        "Speedup of decoding with its 95 % interval, in brackets end to end, then the acceptance "
        f"rate; {num_equal} of {sum(row['num_answers'] for row in rows)} answers equal:"
    )
    cells = {
        row["system"]: f"{interval(row['decode_speedup'])} "
        f"({row['end_to_end_speedup']['mean']:.2f}), {number(row['acceptance_rate'], '.2f')}"
        for row in rows
    }
    return [title, _by_ratio(cells)]


def _by_ratio(cells: Mapping[str, str]) -> str:
    """Returns a table with a row per strategy and a column per ratio, from cells by
    ``"STRATEGY RATIO"``; a system without a ratio has its cell in the first column."""
    table: dict[str, dict[str, str]] = {}
    for name, cell in cells.items():
        strategy, _, last = name.rpartition(" ")
        has_ratio = last.replace(".", "").isdecimal()
        table.setdefault(strategy if has_ratio else name, {})[last if has_ratio else ""] = cell
    ratios = sorted({ratio for row in table.values() for ratio in row})
    rows = [[name, *(row.get(ratio, "") for ratio in ratios)] for name, row in table.items()]
    return _markdown(["strategy, ratio", *(ratio or "as it is" for ratio in ratios)], rows)


def percent(value: Mapping[str, float], *, is_signed: bool = False) -> str:
    """Formats a share and half of its interval in percent."""
    half = 50 * (value["high"] - value["low"])
    return f"{100 * value['mean']:{'+.2f' if is_signed else '.2f'}} ±{half:.2f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _without_records(result: Any) -> Any:
    runs = [
        {key: value for key, value in run.items() if key != "records" or "summary" not in run}
        for run in result.get("runs", ())
    ]
    return {**result, "runs": runs} if runs else result


if __name__ == "__main__":
    main()
