"""Trees of candidates against chains, replayed on recorded answers: ``python -m
bench.predicted.trees bench/out/trees/*.jsonl``.

The files are what `python -m bench.drafts.agreement --choices` writes, one for each draft, kind of
prompt and temperature; those of one draft and temperature make one row. Each row compares decoding
by chains with trees of up to 8 to 64 nodes, on the step times of a pair on H200s, or of the bundled
pair on two cores (docs/results.json). *fixed* is the chain of one length, the best on these clips:
serial on one device, vpsd on two. A gain is how many times as fast a tree decodes as the best
chain, the mean over clips with its 95 % interval. Both have the draft's guesses unless
``--no-guesses``.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.base.environment import ROOT
from bench.base.options import names, parser_of
from bench.pruning.speed import MeasuredForward
from hippo.client.figures import spread
from hippo.client.tables import interval, markdown
from hippo.lab.simulation.machine import ForwardCost, ForwardTime, Machine
from hippo.lab.simulation.pairs import find_pair
from hippo.lab.simulation.recorded import Recording, read_recordings, replay_chain, resized
from hippo.lab.simulation.replay import PolicyChoice
from hippo.lab.simulation.tree_replay import TreeReplay, TreeShape
from hippo.lab.simulation.trees import Experience
from hippo.speculation.estimates import PairTimes

NODES = (8, 16, 32, 64)
HEAD = (
    *("pair", "devices", "draft, T", "fixed (γ)", "adaptive"),
    *(f"trees of {'/'.join(map(str, NODES))}", "gain of 32"),
)
_FIXED = {True: ("serial", (5, 8, 12)), False: ("vpsd", (5, 7))}
"""The published policy for one device or two, and its draft lengths, of which the best counts."""

_GUESSED = 4  # the draft service's default
_DRAFT_ROW = 0.05  # of a step, on a core: a row of the draft

Replay = Callable[[Recording], float]
"""Decode time of an answer in milliseconds."""


class KnownTimes:
    """A ForwardCost that computes each time once."""

    def __init__(self, cost: ForwardCost) -> None:
        self._ms = functools.cache(cost.ms)

    def ms(self, num_rows: int, context: int) -> float:
        return self._ms(num_rows, context)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, a row as soon as it is known."""
    parser = parser_of("bench.predicted.trees", __doc__)
    parser.add_argument("files", nargs="+", type=Path)
    default = ["qwen-3b-32b", "qwen-7b-72b-nf4", "cores"]
    parser.add_argument("--machines", type=names, default=default, help="pairs, or cores")
    parser.add_argument("--devices", type=names, default=["1", "2"], help="1, 2")
    parser.add_argument("--num-clips", type=int, default=8, help="of each file")
    parser.add_argument("--no-guesses", action="store_true", help="the draft feeds no guesses")
    parser.add_argument("--num-choices", type=int, default=3, help="1: trees of one path")
    args = parser.parse_args(argv)
    rows, console = list[tuple[str, ...]](), Console()
    for machine in args.machines:
        for devices in args.devices if machine != "cores" else ["2"]:
            for title, recordings in recorded_by_draft(args.files, args.num_clips).items():
                shape = TreeShape(
                    most_nodes=0, num_choices=args.num_choices, takes_turns=devices == "1",
                    has_guesses=not args.no_guesses,
                )  # fmt: skip
                rows.append(row(machine, title, recordings, shape))
                console.print(" | ".join(rows[-1]), soft_wrap=True, highlight=False)
    console.print(markdown(HEAD, rows, num_names=3), soft_wrap=True)


def recorded_by_draft(files: Sequence[Path], num_clips: int) -> dict[str, list[Recording]]:
    """Returns the first clips of the files by draft and temperature."""
    found: dict[str, list[Recording]] = {}
    for path in files:
        recordings = read_recordings(path)[:num_clips]
        first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        found.setdefault(f"{first['draft']}, {first['temperature']:g}", []).extend(recordings)
    return found


def two_cores() -> Machine:
    """Returns the times of the bundled pair on two cores, of the latest `bench.pruning ratio`;
    beyond 32 rows a line through the last two."""
    results = json.loads((ROOT / "docs/results.json").read_text(encoding="utf-8"))
    times: dict[str, Any] = results["ratio"]["step_times"]
    target = {int(rows): ms for rows, ms in times["target_ms"].items()}
    target[128] = target[32] + 96 * (target[32] - target[16]) / 16
    draft_ms = times["draft_step_ms"]["0.9"]
    return Machine(
        name="two cores", target=MeasuredForward(target),
        draft=ForwardTime(one_row_ms=draft_ms, row_ms=_DRAFT_ROW * draft_ms),
        leg_ms=0.25, draft_message_ms=0.2, target_message_ms=0.065,
    )  # fmt: skip


def row(
    name: str, title: str, recordings: Sequence[Recording], shape: TreeShape
) -> tuple[str, ...]:
    """Returns a row below ``HEAD`` for trees of a ``shape`` but for its number of nodes."""
    is_shared, guessed = shape.takes_turns, _GUESSED if shape.has_guesses else 0
    machine = two_cores()
    if name != "cores":
        pair = find_pair(name)
        machine = pair.machine()
        machine = dataclasses.replace(
            machine, target=KnownTimes(machine.target), draft=KnownTimes(machine.draft)
        )
        recordings = [
            resized(each, pair.num_prompt_tokens, pair.num_draft_tokens) for each in recordings
        ]

    def chain(policy: PolicyChoice) -> Replay:
        known = PairTimes(takes_turns=is_shared)
        return lambda each: (
            replay_chain(policy, each, machine, times=known, max_guessed=guessed).decode_ns / 1e6
        )

    off = _times(chain(PolicyChoice("off")), recordings)
    adaptive = _times(chain(PolicyChoice("adaptive")), recordings)
    policy, gammas = _FIXED[is_shared]
    tried = [(_times(chain(PolicyChoice(policy, each)), recordings), each) for each in gammas]
    fixed, gamma = min(tried, key=lambda each: sum(each[0]))
    cells = [f"{sum(off) / sum(fixed):.2f} ({gamma})", f"{sum(off) / sum(adaptive):.2f}"]
    best = min(fixed, adaptive, key=sum)
    trees = {
        num: tree_times(recordings, machine, dataclasses.replace(shape, most_nodes=num))
        for num in NODES
    }
    cells.append("/".join(f"{sum(off) / sum(times):.2f}" for times in trees.values()))
    return name, "1" if is_shared else "2", title, *cells, _gain(best, trees[32])


def tree_times(recordings: Sequence[Recording], machine: Machine, shape: TreeShape) -> list[float]:
    """Returns the decode time of each answer, after the first was answered once to learn."""
    known = Experience()
    return _times(
        lambda each: TreeReplay(each, machine.costs(), shape, known).run().decode_ns / 1e6,
        recordings,
    )


def _times(replay: Replay, recordings: Sequence[Recording]) -> list[float]:
    replay(recordings[0])
    return [replay(each) for each in recordings]


def _gain(chain: Sequence[float], tree: Sequence[float]) -> str:
    return interval(spread([a / b for a, b in zip(chain, tree, strict=True)]))


if __name__ == "__main__":
    main()
