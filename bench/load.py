"""Throughput and latency of target-only and adaptive with many clients at once.

N clients ask in a closed loop (each asks again when its last answer has ended) about held-out
clips of the bundled pair's world. Every load is measured with each system:

    target-only        the target alone, on its core
    adaptive           draft, gateway and clients on one core, the target on the other
    both cores         target-only with two threads, on both cores    } the same
    two replicas       two target-only stacks, a core each            } hardware

Nothing cached is reused. All answers are compared, token for token, with target-only answers asked
one at a time. A load's window begins when as many requests have ended as there are clients;
throughput counts the answers that end inside it. With --repeats N all loads run N times in turn,
and each line is the run of median throughput.

    python -m bench.load                        short prompts, float32, 1 to 32 clients
    python -m bench.load --quick                1 and 8 clients, target-only and adaptive
    python -m bench.load --kind long --clients 1,8
    python -m bench.load --dtype bfloat16 --temperature 0.8

docs/results.md explains the columns; `python -m bench.pages.results` writes the figures there.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.answers.runs import FORM, questions_about, running_stack
from bench.answers.systems import TARGET_ONLY
from bench.base.cells import LOAD_COLUMNS, cells, load_title
from bench.base.clips import held_out_clips
from bench.base.options import add_out, integers, names, new_result, parser_of, write_result
from bench.base.tables import wide_console, wide_table
from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores
from hippo.client.requests import Question
from hippo.client.server import Server
from hippo.client.tables import progress_bar
from hippo.lab.benchmark.load import ClosedLoop, LoadRun
from hippo.lab.benchmark.load_figures import summarise_load

ADAPTIVE, BOTH_CORES, REPLICAS = "adaptive", "both cores", "two replicas"
SYSTEMS = (TARGET_ONLY, ADAPTIVE, BOTH_CORES, REPLICAS)
_OFF = {"policy": "off"}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes JSON."""
    args = _parse(argv)
    facts = {name: getattr(args, name) for name in ("kind", "dtype", "temperature")}
    result = new_result("bench.load", argv, **facts, loads=[])
    console = wide_console()
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder), kind=args.kind, num_clips=args.num_clips)
        lines: list[dict[str, Any]] = []
        for line in _LoadBench(args, questions_about(clips), console).run():
            lines.append(line)
            result["loads"] = typical_lines(lines)
            write_result(args.out, result)
    rows = cells(LOAD_COLUMNS, result["loads"])
    console.print(wide_table(load_title(result), LOAD_COLUMNS, rows))
    console.print(f"written to {args.out}")


class _LoadBench:
    """Runs the chosen systems; the answers of the first load are the reference for all."""

    def __init__(
        self, args: argparse.Namespace, questions: Sequence[Question], console: Console
    ) -> None:
        self._args = args
        self._questions = questions
        self._console = console
        self._references: dict[int, tuple[int, ...]] = {}
        target_core, draft_core = default_cores("cpu", "cpu")
        slots = ("--slots", str(max(args.clients)))
        self._options = StackOptions(
            target_model=args.target_model,
            draft_model=args.draft_model,
            dtype=args.dtype,
            target_core=target_core,
            draft_core=draft_core,
            prefill_helper_layers="0" if draft_core is None else "auto",  # as `hippo up`
            port=0,
            target_args=slots,
            draft_args=slots,
        )

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields the figures of each load."""
        args, options = self._args, self._options
        all_cores = os.sched_getaffinity(0)
        with running_stack(options) as stack:
            if options.draft_core is not None:
                os.sched_setaffinity(0, {options.draft_core})
            self._ask_one_at_a_time(stack)
            yield from self._loads((TARGET_ONLY, ADAPTIVE), [stack])
        os.sched_setaffinity(0, all_cores)
        options = replace(options, prefill_helper_layers="0")
        if BOTH_CORES in args.systems:
            threads = (*options.target_args, "--num-threads", "2")
            unpinned = replace(options, target_core=None, draft_core=None, target_args=threads)
            with running_stack(unpinned) as stack:
                yield from self._loads((BOTH_CORES,), [stack])
        if REPLICAS in args.systems:
            cores = options.target_core, options.draft_core
            if None in cores:
                self._console.print("two replicas need two cores: left out")
                return
            with contextlib.ExitStack() as both:
                pinned = [replace(options, target_core=core, draft_core=core) for core in cores]
                stacks = [both.enter_context(running_stack(each)) for each in pinned]
                yield from self._loads((REPLICAS,), stacks)

    def _loads(self, systems: Sequence[str], stacks: Sequence[Stack]) -> Iterator[dict[str, Any]]:
        """Yields the figures of ``systems``, if chosen, for all numbers of clients."""
        args = self._args
        for _ in range(args.repeats):
            for num_clients in args.clients:
                for system in systems:
                    if system in args.systems:
                        num_answers = max(args.answers, args.rounds * num_clients)
                        run = self._loop(system, num_clients, stacks, num_answers)
                        figures = summarise_load(run, self._references)
                        yield {"system": system, "num_clients": num_clients, **figures}

    def _ask_one_at_a_time(self, stack: Stack) -> None:
        """Gets the reference answers; also warms up the stack."""
        for system in (ADAPTIVE, TARGET_ONLY):
            run = self._loop(system, 1, [stack], len(self._questions))
            self._references = {index: answer.token_ids for index, answer in run.answers}

    def _loop(
        self, system: str, num_clients: int, stacks: Sequence[Stack], num_answers: int
    ) -> LoadRun:
        args = self._args
        speculative: Mapping[str, Any] = _OFF
        if system == ADAPTIVE:
            ratio = args.ratio if args.kind == "long" else 0.0
            pruning = {"strategy": "holistic" if ratio else "none", "ratio": ratio}
            speculative = {"policy": "adaptive", "pruning": pruning}
        form = replace(FORM, max_tokens=args.max_tokens, temperature=args.temperature)
        with progress_bar(self._console) as progress:
            task = progress.add_task(
                f"{system}, {num_clients} clients", total=num_clients + num_answers
            )
            return ClosedLoop(
                [Server(stack.url) for stack in stacks],
                [form.request(question, speculative) for question in self._questions],
                num_clients=num_clients,
                num_answers=num_answers,
                on_answer=lambda: progress.advance(task),
            ).run()


def typical_lines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one line per system and number of clients: of repeated runs the one of median
    throughput, with the range of throughputs, and equality over the answers of all runs."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["system"], line["num_clients"]), []).append(line)
    typical = []
    for group in groups.values():
        ordered = sorted(group, key=lambda line: float(line["tokens_per_s"]))
        typical.append(
            {
                **ordered[(len(ordered) - 1) // 2],
                "tokens_per_s_range": [ordered[0]["tokens_per_s"], ordered[-1]["tokens_per_s"]],
                "num_runs": len(group),
                "num_equal": sum(line["num_equal"] for line in group),
                "num_answers": sum(line["num_answers"] for line in group),
            }
        )
    return typical


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.load", __doc__)
    add = parser.add_argument
    add("--clients", type=integers, default=[1, 2, 4, 8, 16, 32], help="numbers of clients")
    add("--systems", type=names, default=list(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    add("--answers", type=int, default=24, help="least number of answers per load")
    add("--rounds", type=int, default=3, help="least number of answers per client")
    add("--repeats", type=int, default=1, help="runs of each load, in turn; the median one counts")
    add("--kind", choices=("short", "long"), default="short", help="prompts")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--temperature", type=float, default=0.0)
    add("--max-tokens", type=int, default=256, help="longest answer")
    add("--ratio", type=float, default=0.9, help="share pruned on long prompts")
    add("--num-clips", type=int, default=24, help="held-out clips that are asked about in turn")
    add("--target-model", default=str(BUNDLED_PAIR / "target"))
    add("--draft-model", default=str(BUNDLED_PAIR / "draft"))
    add("--quick", action="store_true", help="1 and 8 clients, target-only and adaptive")
    add_out(parser, "load.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.clients, args.systems = [1, 8], [TARGET_ONLY, ADAPTIVE]
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems: no {', '.join(sorted(unknown))}; choose of {', '.join(SYSTEMS)}")
    counts = (*args.clients, args.answers, args.rounds, args.repeats)
    if not args.clients or min(counts) < 1:
        parser.error("--clients, --answers, --rounds and --repeats must be at least 1")
    return args


if __name__ == "__main__":
    main()
