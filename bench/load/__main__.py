"""Throughput and latency of target-only and adaptive with many clients at once.

N clients ask in a closed loop (each asks again when its last answer has ended) about held-out
clips of the bundled pair's world. Every load is measured with each system:

    target-only        the target alone, on its core
    adaptive           draft, gateway and clients on one core, the target on the other
    both cores         target-only with two threads, on both cores    } the same
    two replicas       two target-only stacks, a core each            } hardware

With --questions-per-clip N a client asks N different questions about a clip before the next clip;
all but the first reuse the cached features of the clip, and the keys and values of the prompt
before the question. Otherwise nothing cached is reused.

All answers are compared, token for token, with target-only answers asked one at a time. A load's
window begins when as many requests have ended as there are clients; throughput counts the answers
that end inside it. With --repeats N all loads run N times in turn, and each line is the run of
median throughput.

    python -m bench.load                        short prompts, float32, 1 to 32 clients
    python -m bench.load --quick                1 and 8 clients, target-only and adaptive
    python -m bench.load --kind long --clients 1,8
    python -m bench.load --clients 1,8 --questions-per-clip 6
    python -m bench.load --dtype bfloat16 --temperature 0.8

docs/results.md explains the columns; `python -m bench.pages.results` writes the figures there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from bench.answers.measure import form_for, questions_about
from bench.answers.systems import TARGET_ONLY
from bench.base.cells import LOAD_COLUMNS, load_rows, load_title
from bench.base.clips import ClipFile, Kind, held_out_clips
from bench.base.options import add_out, integers, names, new_result, parser_of, write_result
from bench.base.tables import wide_console, wide_table
from bench.load.figures import Reading, service_figures, typical_lines
from bench.load.stack import LoadStack, load_stack
from hippo.cli.stack import BUNDLED_PAIR, StackOptions, default_cores
from hippo.client.requests import RequestForm
from hippo.client.server import Server
from hippo.client.tables import progress_bar
from hippo.lab.benchmark.load import ClosedLoop, LoadRun
from hippo.lab.benchmark.load_figures import summarise_load

ADAPTIVE, BOTH_CORES, REPLICAS = "adaptive", "both cores", "two replicas"
SYSTEMS = (TARGET_ONLY, ADAPTIVE, BOTH_CORES, REPLICAS)
_OFF = {"policy": "off"}

FURTHER_QUESTIONS = (
    "What happens in the video?",
    "List the objects.",
    "What does the video show?",
    "Summarise the video.",
    "Which objects are there?",
    "Describe this video.",
)
"""Questions about a clip after the first one; all have long answers."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes JSON."""
    args = _parse(argv)
    result = new_result(
        "bench.load",
        argv,
        kind=args.kind,
        dtype=args.dtype,
        draft_dtype=args.draft_dtype or "auto",
        temperature=args.temperature,
        questions_per_clip=args.questions_per_clip,
        loads=[],
    )
    console = wide_console()
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder), kind=cast(Kind, args.kind), num_clips=args.num_clips)
        bench = _LoadBench(args, clips, console)
        lines: list[dict[str, Any]] = []
        for line in bench.run():
            lines.append(line)
            result["loads"] = typical_lines(lines)
            write_result(args.out, result)
    console.print(wide_table(load_title(result), LOAD_COLUMNS, load_rows(result)))
    console.print(f"written to {args.out}")


class _LoadBench:
    """Runs the chosen systems; the answers of the first load are the reference for all."""

    def __init__(
        self, args: argparse.Namespace, clips: Sequence[ClipFile], console: Console
    ) -> None:
        self._args = args
        self._questions = questions_about(
            [
                replace(clip, question=question) if question else clip
                for clip in clips
                for question in (None, *FURTHER_QUESTIONS[: args.questions_per_clip - 1])
            ]
        )
        self._console = console
        self._references: dict[int, tuple[int, ...]] = {}
        target_core, draft_core = default_cores("cpu", "cpu")
        self._options = StackOptions(
            target_model=args.target_model,
            draft_model=args.draft_model,
            dtype=args.dtype,
            draft_dtype=args.draft_dtype,
            target_core=target_core,
            draft_core=draft_core,
            port=0,
        )

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields the figures of each load."""
        args, options = self._args, self._options
        all_cores = os.sched_getaffinity(0)
        with load_stack(options, num_slots=self._num_slots) as stack:
            if options.draft_core is not None:
                os.sched_setaffinity(0, {options.draft_core})
            self._ask_one_at_a_time(stack)
            yield from self._loads((TARGET_ONLY, ADAPTIVE), [stack])
        os.sched_setaffinity(0, all_cores)
        if BOTH_CORES in args.systems:
            unpinned = replace(
                options, target_core=None, draft_core=None, target_args=("--num-threads", "2")
            )
            with load_stack(unpinned, num_slots=self._num_slots) as stack:
                yield from self._loads((BOTH_CORES,), [stack])
        if REPLICAS in args.systems:
            cores = options.target_core, options.draft_core
            if None in cores:
                self._console.print("two replicas need two cores: left out")
                return
            with contextlib.ExitStack() as both:
                stacks = []
                for core in cores:
                    pinned = replace(options, target_core=core, draft_core=core)
                    stacks.append(both.enter_context(load_stack(pinned, num_slots=self._num_slots)))
                yield from self._loads((REPLICAS,), stacks)

    def _loads(
        self, systems: Sequence[str], stacks: Sequence[LoadStack]
    ) -> Iterator[dict[str, Any]]:
        """Yields the figures of ``systems``, if chosen, for all numbers of clients."""
        for _ in range(self._args.repeats):
            for num_clients in self._args.clients:
                for system in systems:
                    if system in self._args.systems:
                        yield self._measure(system, num_clients, stacks)

    @property
    def _num_slots(self) -> int:
        counts: list[int] = self._args.clients
        return max(counts)

    def _ask_one_at_a_time(self, stack: LoadStack) -> None:
        """Gets the reference answers, without reuse of caches; also warms up the stack."""
        for speculative in (self._speculative(ADAPTIVE), _OFF):
            num_answers = len(self._questions)
            run = self._loop("one at a time", speculative, 1, [stack], num_answers, num_together=1)
            self._references = {index: answer.token_ids for index, answer in run.answers}

    def _measure(
        self, system: str, num_clients: int, stacks: Sequence[LoadStack]
    ) -> dict[str, Any]:
        args = self._args
        num_answers = max(args.answers, args.rounds * num_clients)
        before: list[Reading] = []
        run = self._loop(
            f"{system}, {num_clients} clients",
            self._speculative(system),
            num_clients,
            stacks,
            num_answers,
            num_together=args.questions_per_clip,
            on_start=lambda: before.extend(stack.read_counters() for stack in stacks),
        )
        after = [stack.read_counters() for stack in stacks]
        services = [service_figures(*pair) for pair in zip(before, after, strict=True)]
        line = {**summarise_load(run, self._references), "services": services[0]}
        if len(services) > 1:
            line["other_services"] = services[1:]
        return {"system": system, "num_clients": num_clients, **line}

    def _speculative(self, system: str) -> Mapping[str, Any]:
        if system != ADAPTIVE:
            return _OFF
        ratio = self._args.ratio if self._args.kind == "long" else 0.0
        pruning = {"strategy": "holistic" if ratio else "none", "ratio": ratio}
        return {"policy": "adaptive", "pruning": pruning}

    def _loop(
        self,
        title: str,
        speculative: Mapping[str, Any],
        num_clients: int,
        stacks: Sequence[LoadStack],
        num_answers: int,
        *,
        num_together: int,
        on_start: Callable[[], None] = lambda: None,
    ) -> LoadRun:
        args, servers = self._args, [Server(stack.url) for stack in stacks]
        form = RequestForm(model="hippo", max_tokens=args.max_tokens, temperature=args.temperature)
        form = form_for(servers[0], self._questions[0], form)
        with progress_bar(self._console) as progress:
            task = progress.add_task(title, total=num_clients + num_answers)
            return ClosedLoop(
                servers,
                [form.request(question, speculative) for question in self._questions],
                num_clients=num_clients,
                num_answers=num_answers,
                num_together=num_together,
                on_start=on_start,
                on_answer=lambda: progress.advance(task),
            ).run()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.load", __doc__)
    add = parser.add_argument
    add("--clients", type=integers, default=[1, 2, 4, 8, 16, 32], help="numbers of clients")
    add("--systems", type=names, default=list(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    add("--answers", type=int, default=24, help="least number of answers per load")
    add("--rounds", type=int, default=3, help="least number of answers per client")
    add("--repeats", type=int, default=1, help="runs of each load, in turn; the median one counts")
    add("--questions-per-clip", type=int, default=1, help="asked one after another by one client")
    add("--kind", choices=("short", "long"), default="short", help="prompts")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--temperature", type=float, default=0.0)
    add("--max-tokens", type=int, default=256, help="longest answer")
    add("--ratio", type=float, default=0.9, help="share pruned on long prompts")
    add("--num-clips", type=int, default=24, help="held-out clips that are asked about in turn")
    add("--target-model", default=str(BUNDLED_PAIR / "target"))
    add("--draft-model", default=str(BUNDLED_PAIR / "draft"))
    add("--draft-dtype", help="default: the draft service's own, float16 on a CPU")
    add("--quick", action="store_true", help="1 and 8 clients, target-only and adaptive")
    add_out(parser, "load.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.clients, args.systems = [1, 8], [TARGET_ONLY, ADAPTIVE]
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems: no {', '.join(sorted(unknown))}; choose of {', '.join(SYSTEMS)}")
    if (
        not args.clients
        or min(args.clients) < 1
        or min(args.answers, args.rounds, args.repeats) < 1
    ):
        parser.error("--clients, --answers, --rounds and --repeats are at least 1")
    if not 1 <= args.questions_per_clip <= 1 + len(FURTHER_QUESTIONS):
        parser.error(f"--questions-per-clip is 1 to {1 + len(FURTHER_QUESTIONS)}")
    return args


if __name__ == "__main__":
    main()
