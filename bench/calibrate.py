"""What steps of the bundled pair take by themselves, and beside each other: the machine's own part.

``python -m bench.calibrate`` runs target and draft in processes of their own on the cores that the
benchmark gives them, without services or policies, and times steps (the forward and the choice of
tokens) by number of rows: alone, while the other one steps without a pause, and in turn with it,
each behind a rest, for which data and code must come from memory again. A third process on the
draft's core then gets messages while that steps: most wake it at once, some wait until the
scheduler lets it in. Last each of the two steps while blocks go from the draft to the target over
gRPC, through a process in the gateway's place, as they do from a draft that never stops.
``python -m bench.simulate_fit --calibration FILE`` takes from it how a step's time grows with rows,
what the two cores take from each other, what a rest costs, how many messages are late by how much,
and what a block takes from the steps of either: one policy sees few numbers of rows, and some see
no overlap, no rest, or no block in a step at all.

On a machine that is shared with others, steps of several rows are slow for a while and fast for a
while (spans of a tenth of a second and more). What counts is therefore the mean over all rounds, as
answers take the mean, too; and ``simulate_fit`` takes several calibrations, best made between the
measurements that are to be fitted.

What else runs on such a machine pushes the weights out of the cache while they rest, and it takes
steps without a pause for a tenth of a second until these are fast again. So steps are timed only
behind others like them (``_SETTLE_S``), and those behind a rest where rests and steps alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.block_stream import BLOCK_EVERY_S, relay_blocks, serve_blocks
from bench.calibration import SIDES, BlockRounds, Calibration, Rounds, calibration_of
from bench.environment import ROOT, describe_environment
from bench.step_time import random_clip
from hippo.benchmark.tables import wide_console
from hippo.cli.stack import BUNDLED_PAIR, default_cores
from hippo.config import load_settings
from hippo.engine.cpu import CoreWaits
from hippo.engine.settings import EngineSettings
from hippo.event_loop import run
from hippo.models.base import SequenceRows, StepPlan
from hippo.models.loading import load_model
from hippo.sampling.rule import choose_tokens
from hippo.speculation.virtual_time import COLD_AFTER_NS
from hippo.types import ChatMessage, FramePlan, MediaPart, SamplingParams, TextPart
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

ROWS = {"target": (1, 2, 3, 4, 6, 8, 11, 16, 24, 32), "draft": (1, 2, 3, 5, 9, 13)}
_BESIDE = {"target": (1, 4, 8, 16), "draft": (1, 5)}  # rows timed while the other one steps
_MESSAGE_WORK_MS = 0.16  # what the gateway does about a block (docs/performance-round.md)
_MESSAGE_EVERY_S = 0.0021
# Of the steps meanwhile: what adaptive and always optimistic verify, and what the draft guesses.
_BLOCK_ROWS = {"target": 24, "draft": 3}
_BUSY_ROWS = {"target": 8, "draft": 5}  # of the other one's steps meanwhile
_COLD_ROWS = (1, 4, 8, 16, 32)  # of the target's step behind a rest
_NUM_COLD = 4  # steps of the draft behind a rest; after them a step is as ever
_REST_MS = COLD_AFTER_NS / 1e6
_CONTEXT = 180  # cached tokens: the mean over the answers to short prompts
_SETTLE_S = 0.1  # of steps before those that are timed
_TURNS = 12  # of the target's step and the draft's steps for each number of rows
_SETTLE_TURNS = 4  # the first ones, which do not count


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON."""
    args = _parse(argv)
    if args.serve == "listener":
        _listen()
        return
    if args.serve == "relay":
        run(relay_blocks())
        return
    if args.serve:
        _serve(args.serve, args.dtype)
        return
    target_core, draft_core = default_cores("cpu", "cpu")
    cores = {"target": target_core, "draft": draft_core}
    given = argv if argv is not None else sys.argv[1:]
    steppers = {side: _Child(side, args.dtype, cores[side]) for side in SIDES}
    listener, relay = (_Child(name, args.dtype, draft_core) for name in ("listener", "relay"))
    try:
        rounds = measure(steppers, num_rounds=args.rounds, seconds=args.seconds)
        delays_ms = {"idle": _delays_ms(listener, args.messages)}
        steppers["draft"].begin(_BUSY_ROWS["draft"], 3 * _MESSAGE_EVERY_S * args.messages)
        delays_ms["busy"] = _delays_ms(listener, args.messages)
        steppers["draft"].end()
        blocks_ms = measure_blocks(
            steppers, relay, num_rounds=2 * args.rounds, seconds=2 * args.seconds
        )
    finally:
        for child in (*steppers.values(), listener, relay):
            child.close()
    document = {
        "command": " ".join(["python -m bench.calibrate", *given]),
        "environment": describe_environment(),
        "dtype": args.dtype,
        "rounds_ms": rounds,
        "delays_ms": delays_ms,
        "blocks_ms": blocks_ms,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _print(calibration_of(rounds, delays_ms, blocks_ms), rounds)


class _Child:
    """A model, or who gets or sends messages, in a process of its own, on one core."""

    def __init__(self, side: str, dtype: str, core: int | None) -> None:
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        command = [sys.executable, "-m", "bench.calibrate", "--serve", side, "--dtype", dtype]
        self._child = subprocess.Popen(
            [*pinned, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.port: int | None = self.receive()  # it is warm; where it has blocks, if it does
        self.waited_ms = 0.0

    def begin(self, rows: int, seconds: float, settle_s: float = 0.0) -> None:
        self.send([rows, settle_s, seconds])

    def end(self) -> float:
        """The mean of the steps since ``begin`` (at least one) in milliseconds, behind those of
        its first ``settle_s``; ``waited_ms`` of it its thread waited for its core."""
        took, self.waited_ms = self.receive()
        return float(took)

    def send(self, message: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def receive(self) -> Any:
        return json.loads(self._answer())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("a model's process ended; its message stands above")
        return line


def measure(steppers: Mapping[str, Any], *, num_rounds: int, seconds: float) -> Rounds:
    """A mean step's milliseconds in each round, by side, kind and rows: "alone", "beside" the other
    one's steps, and what those "behind a rest" take longer (of the draft, all of them together).

    Every number of rows has its turn in each round, so that all see the machine fast and slow.
    """
    found: Rounds = {side: defaultdict(lambda: defaultdict(list)) for side in SIDES}

    def usual_ms(side: str, rows: int) -> float:
        steppers[side].begin(rows, seconds, _SETTLE_S)
        took: float = steppers[side].end()
        return took

    for _ in range(num_rounds):
        for side, other in (SIDES, SIDES[::-1]):
            for rows in ROWS[side]:
                found[side]["alone"][str(rows)].append(usual_ms(side, rows))
                if rows not in _BESIDE[side]:
                    continue
                steppers[other].begin(_BUSY_ROWS[other], 1.5 * (_SETTLE_S + seconds))
                time.sleep(0.1 * seconds)
                found[side]["beside"][str(rows)].append(usual_ms(side, rows))
                steppers[other].end()
        drafts_ms = []
        for rows in _COLD_ROWS:
            target_ms, draft_ms = _behind_rests(steppers, rows)
            alone_ms = found["target"]["alone"][str(rows)][-1]
            found["target"]["behind a rest"][str(rows)].append(target_ms - alone_ms)
            drafts_ms.append(draft_ms)
        rows = _BUSY_ROWS["draft"]
        found["draft"]["behind a rest"][str(rows)].append(statistics.mean(drafts_ms))
    return found


def _behind_rests(steppers: Mapping[str, Any], rows: int) -> tuple[float, float]:
    """What the target's step of ``rows`` takes in turn with the draft's for ``_REST_MS``, and what
    these take longer than as many without a rest before them, had they rested as long."""
    target, draft = (steppers[side] for side in SIDES)
    targets_ms, drafts_ms = [], []
    for _ in range(_TURNS):
        target.begin(rows, 0.0)
        targets_ms.append(target.end())
        cold_ms = []
        for _ in range(_NUM_COLD):
            draft.begin(_BUSY_ROWS["draft"], 0.0)
            cold_ms.append(draft.end())
        draft.begin(_BUSY_ROWS["draft"], max(0.0, _REST_MS - sum(cold_ms)) / 1e3)
        excess_ms = sum(cold_ms) - _NUM_COLD * draft.end()
        drafts_ms.append(excess_ms * _REST_MS / targets_ms[-1])
    target_ms, draft_ms = (statistics.mean(x[_SETTLE_TURNS:]) for x in (targets_ms, drafts_ms))
    return target_ms, draft_ms


def measure_blocks(
    steppers: Mapping[str, Any], relay: Any, *, num_rounds: int, seconds: float
) -> BlockRounds:
    """In each round, by side, the milliseconds by which a block on its way from draft to target
    makes that side's steps longer, and how many of them its thread waited for its core: steps are
    timed before, while and after ``relay`` relays."""
    found: BlockRounds = {side: [] for side in SIDES}
    ports = [steppers[side].port for side in reversed(SIDES)]
    for _ in range(num_rounds):
        for side in SIDES:
            took, waited = [], []
            for is_relaying in (False, True, False):
                if is_relaying:
                    relay.send([*ports, 1.2 * (_SETTLE_S + seconds)])
                    relay.receive()  # the first one has arrived
                steppers[side].begin(_BLOCK_ROWS[side], seconds, _SETTLE_S)
                took.append(steppers[side].end())
                waited.append(steppers[side].waited_ms)
                if is_relaying:
                    relay.receive()
            num_blocks = took[1] / (BLOCK_EVERY_S * 1e3)
            found[side].append(
                [(each[1] - (each[0] + each[2]) / 2) / num_blocks for each in (took, waited)]
            )
    return found


def _delays_ms(listener: _Child, num_messages: int) -> list[float]:
    """From each message's sending until its receiver runs."""
    for _ in range(num_messages):
        listener.send(time.monotonic_ns())
        time.sleep(_MESSAGE_EVERY_S)
    listener.send(None)
    delays: list[float] = listener.receive()
    return delays


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _listen() -> None:
    """Notes when each line comes that says when it was sent, until that ends."""
    _say("null")
    delays: list[float] = []
    for line in sys.stdin:
        now, sent = time.monotonic_ns(), json.loads(line)
        if sent is None:
            _say(json.dumps(delays))
            delays = []
            continue
        delays.append(round((now - sent) / 1e6, 4))
        while time.monotonic_ns() < now + _MESSAGE_WORK_MS * 1e6:
            pass


def _service_settings(side: str) -> EngineSettings:
    """Those with which a benchmark starts the service: its steps are what is measured."""
    return load_settings(
        DraftSettings if side == "draft" else TargetSettings,
        ["--model", str(BUNDLED_PAIR / side)],
        os.environ,
        env_prefix=f"HIPPO_{side.upper()}",
        prog=f"python -m services.{side}",
        description="",
    )


def _serve(side: str, dtype: str) -> None:
    """Steps as it is asked to on stdin, ``[rows, settle_s, seconds]`` a line, until that ends."""
    torch.set_num_threads(1)
    service = _service_settings(side)
    model = load_model(
        service.model,
        device="cpu",
        dtype=dtype if side == "target" else "auto",  # as the benchmark starts the service
        auto_is_half=service.auto_is_half,
        max_context_length=4096,
        compile_folder=service.compile_folder,
        must_compile=service.must_compile,
    )
    prompt = model.prepare(
        [ChatMessage("user", (MediaPart(0), TextPart("What happens?")))],
        [random_clip(8, 112)],
        FramePlan(),
    )
    list(model.prefill(0, prompt, model.embed_visual(prompt), None))
    num_before = max(1, _CONTEXT - prompt.length)
    model.forward(StepPlan((SequenceRows(0, 0, (1,) * num_before),)))

    def step_ms(rows: int) -> float:
        plan = StepPlan((SequenceRows(0, num_before, tuple(range(1, rows + 1))),))
        began = time.perf_counter()
        choose_tokens(model.forward(plan), SamplingParams()).tolist()
        return (time.perf_counter() - began) * 1e3

    for rows in ROWS[side] * 2:
        step_ms(rows)
    _say(json.dumps(serve_blocks()))
    waits = CoreWaits()
    for line in sys.stdin:
        rows, settle_s, seconds = json.loads(line)
        settled = time.perf_counter() + settle_s
        while time.perf_counter() < settled:
            step_ms(rows)
        waits.take_ns()
        end, took = time.perf_counter() + seconds, [step_ms(rows)]
        while time.perf_counter() < end:
            took.append(step_ms(rows))
        _say(json.dumps([statistics.mean(took), waits.take_ns() / 1e6 / len(took)]))


def _print(found: Calibration, rounds: Rounds) -> None:
    console = wide_console()
    for side, kinds in rounds.items():
        for kind in ("alone", "beside"):
            listed = ", ".join(
                f"{rows}: {statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"
                for rows, values in kinds[kind].items()
            )
            console.print(f"{side} {kind}, ms by rows [fastest round, slowest]: {listed}")
        console.print(f"{side} beside the other: {found.contention[side]:+.1%}")
        listed = ", ".join(f"{rows:g}: {took:+.2f}" for rows, took in found.cold_ms[side])
        console.print(f"{side} behind a rest of {_REST_MS:g} ms, ms more by rows: {listed}")
    console.print(
        f"messages to a core that steps: {found.late_share:.1%} are late, by "
        f"{found.late_ms:.2f} ms on the average"
    )
    console.print(f"a block that reaches the target in a step: {found.block_ms:+.3f} ms")
    console.print(
        "the draft's step while others have its core about a block: "
        f"{found.draft_disturbance:.0%} of their time longer besides"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dtype", default="float32", help="the target's (default: %(default)s)")
    add("--rounds", type=int, default=5, help="of all numbers of rows (default: %(default)s)")
    add("--seconds", type=float, default=0.12, help="of steps at a time (default: %(default)s)")
    add("--messages", type=int, default=1500, help="whose delay is told (default: %(default)s)")
    add("--serve", choices=(*SIDES, "listener", "relay"), help=argparse.SUPPRESS)
    add("--out", type=Path, default=ROOT / "bench/out/calibration.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
