"""From the arguments of ``hippo simulate`` to a machine and traces."""

from __future__ import annotations

import argparse
import dataclasses

from hippo.errors import InvalidRequestError
from hippo.simulation.hardware import GPUS, Placement
from hippo.simulation.machine import ForwardTime, Machine
from hippo.simulation.pairs import PAIRS, ModelPair, find_pair, pair_machine
from hippo.simulation.traces import (
    Trace,
    agreement_of_run_length,
    drawn_traces,
    read_traces,
)

DEFAULT_PAIR = "qwen-7b-72b"


def machine_of(arguments: argparse.Namespace) -> tuple[ModelPair | None, Machine]:
    """The machine asked for and, with --pair, the pair. Raises InvalidRequestError."""
    has_steps = arguments.target_ms is not None or arguments.draft_ms is not None
    if has_steps and arguments.pair is not None:
        raise InvalidRequestError("give one machine: --pair, or --target-ms with --draft-ms")
    if has_steps:
        for name in ("gpu", "target_gpus", "ratio", "visual_tokens"):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(f"{option} is about a --pair; choose {', '.join(PAIRS)}")
    if arguments.row_ms is not None and not has_steps:
        raise InvalidRequestError("--row-ms goes with --target-ms and --draft-ms")
    pair = None
    if has_steps:
        machine = _stated(arguments)
    else:
        pair = _sized(find_pair(arguments.pair or DEFAULT_PAIR), arguments)
        target, draft = placements_of(arguments, pair)
        machine = pair_machine(pair, target=target, draft=draft, ratio=ratio_of(arguments))
    changes = {
        "leg_ms": arguments.delay_ms,
        "draft_message_ms": arguments.message_ms,
        "target_message_ms": arguments.message_ms,
        "target_scheduling_ms": arguments.scheduling_ms,
        "jitter": arguments.jitter,
    }
    for name, value in changes.items():
        if value is not None and not 0 <= value < 1e6:
            raise InvalidRequestError(f"{name} is {value:g}; it must be at least 0")
    known = {name: value for name, value in changes.items() if value is not None}
    return pair, dataclasses.replace(machine, **known)


def _stated(arguments: argparse.Namespace) -> Machine:
    target_ms, draft_ms = arguments.target_ms, arguments.draft_ms
    if target_ms is None or draft_ms is None or target_ms <= 0 or draft_ms <= 0:
        raise InvalidRequestError("--target-ms and --draft-ms go together, both above 0")
    row_ms = 0.02 * target_ms if arguments.row_ms is None else arguments.row_ms
    return Machine(
        name=f"steps of {target_ms:g} and {draft_ms:g} ms",
        target=ForwardTime(one_row_ms=target_ms, row_ms=row_ms),
        draft=ForwardTime(one_row_ms=draft_ms),
        leg_ms=0.25,
        sources=("step times as stated; 0.25 ms a message unless --delay-ms says otherwise",),
    )


def _sized(pair: ModelPair, arguments: argparse.Namespace) -> ModelPair:
    changes = {
        "num_target_gpus": arguments.target_gpus,
        "num_visual_tokens": arguments.visual_tokens,
    }
    for name, value in changes.items():
        if value is not None and value < 1:
            raise InvalidRequestError(f"{name} is {value}; it must be at least 1")
    if not 0 <= ratio_of(arguments) <= 0.99:
        raise InvalidRequestError(f"--ratio is {arguments.ratio:g}; it must be 0 to 0.99")
    return dataclasses.replace(pair, **{k: v for k, v in changes.items() if v is not None})


def placements_of(arguments: argparse.Namespace, pair: ModelPair) -> tuple[Placement, Placement]:
    """Where the pair's target and draft stand."""
    gpu = GPUS[arguments.gpu or "h200"]
    return Placement(gpu=gpu, num_gpus=pair.num_target_gpus), Placement(gpu=gpu)


def ratio_of(arguments: argparse.Namespace) -> float:
    """Share of visual tokens pruned for the draft."""
    return 0.9 if arguments.ratio is None else float(arguments.ratio)


def traces_of(arguments: argparse.Namespace, pair: ModelPair | None) -> list[Trace]:
    """The traces asked for: of a file, or drawn. Raises InvalidRequestError."""
    if arguments.traces is not None:
        for name in ("burstiness", "num_traces", "tokens", "seed"):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(f"{option} is about drawn answers, not --traces")
        num_prompt_tokens = pair.num_prompt_tokens if pair is not None else 0
        return read_traces(arguments.traces, num_prompt_tokens=num_prompt_tokens)
    rate = 0.9 if arguments.acceptance is None else arguments.acceptance
    if arguments.run_length is not None:
        rate = agreement_of_run_length(arguments.run_length)
    if not 0 <= rate <= 1:
        raise InvalidRequestError(f"--acceptance is {rate:g}; it is a share, 0 to 1")
    return drawn_of(arguments, pair, rate)


def drawn_of(arguments: argparse.Namespace, pair: ModelPair | None, rate: float) -> list[Trace]:
    """Answers drawn at a rate."""
    burstiness = 0.5 if arguments.burstiness is None else arguments.burstiness
    num_traces = 12 if arguments.num_traces is None else arguments.num_traces
    num_tokens = 256 if arguments.tokens is None else arguments.tokens
    if not 0 <= burstiness <= 1:
        raise InvalidRequestError(f"--burstiness is {burstiness:g}; it must be 0 to 1")
    if num_traces < 1 or num_tokens < 2:
        raise InvalidRequestError(
            f"--num-traces {num_traces} --tokens {num_tokens}: there must be an answer of two "
            "tokens at least"
        )
    return drawn_traces(
        agreement=rate,
        num_traces=num_traces,
        num_tokens=num_tokens,
        burstiness=burstiness,
        num_prompt_tokens=pair.num_prompt_tokens if pair is not None else 0,
        num_draft_prompt_tokens=pair.num_draft_tokens(ratio_of(arguments)) if pair else 0,
        seed=arguments.seed or 0,
    )
