"""Builds the machine and the traces from the arguments of ``hippo simulate``."""

import argparse
import dataclasses
from typing import Any

from hippo.errors import InvalidRequestError
from hippo.lab.commands.options import check_range, refuse
from hippo.lab.simulation.hardware import GPUS
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.pairs import PAIRS, ModelPair, find_pair
from hippo.lab.simulation.traces import Trace, agreement_of_run_length, drawn_traces, read_traces

_DEFAULT_PAIR = "qwen-7b-72b"
_MOST = 1e6  # largest value for any option


def machine_of(arguments: argparse.Namespace) -> tuple[ModelPair | None, Machine]:
    """Returns the pair (None with --target-ms and --draft-ms) and the machine.

    Raises InvalidRequestError for options that are out of range or exclude each other.
    """
    times = ("row_ms", "delay_ms", "message_ms", "scheduling_ms", "jitter")
    check_range(arguments, 0, *times, most=_MOST)
    has_steps = arguments.target_ms is not None or arguments.draft_ms is not None
    pair = None
    if has_steps:
        if arguments.pair is not None:
            raise InvalidRequestError("give one machine: --pair, or --target-ms with --draft-ms")
        about = f"is about a --pair; choose {', '.join(PAIRS)}"
        refuse(arguments, ("gpu", "target_gpus", "ratio", "visual_tokens", "eager"), about)
        machine = _stated(arguments)
    else:
        refuse(arguments, ("row_ms",), "goes with --target-ms and --draft-ms")
        pair = _sized(find_pair(arguments.pair or _DEFAULT_PAIR), arguments)
        machine = pair.machine()
    changes = _given(
        leg_ms=arguments.delay_ms,
        draft_message_ms=arguments.message_ms,
        target_message_ms=arguments.message_ms,
        target_scheduling_ms=arguments.scheduling_ms,
        jitter=arguments.jitter,
    )
    return pair, dataclasses.replace(machine, **changes)


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
    check_range(arguments, 1, "target_gpus", "visual_tokens", most=_MOST)
    check_range(arguments, 0, "ratio", most=0.99)
    counts = _given(
        num_target_gpus=arguments.target_gpus, num_visual_tokens=arguments.visual_tokens
    )
    others = _given(
        gpu=GPUS.get(arguments.gpu),
        ratio=arguments.ratio,
        has_graphs=False if arguments.eager else None,
    )
    return dataclasses.replace(pair, **counts, **others)


def traces_of(arguments: argparse.Namespace, pair: ModelPair | None) -> list[Trace]:
    """Returns the traces, read from --traces or drawn at random. Raises InvalidRequestError."""
    num_prompt_tokens = pair.num_prompt_tokens if pair is not None else 0
    if arguments.traces is not None:
        about = "is about drawn answers, not --traces"
        refuse(arguments, ("burstiness", "num_traces", "tokens", "seed"), about)
        return read_traces(arguments.traces, num_prompt_tokens=num_prompt_tokens)
    check_range(arguments, 0, "acceptance", "burstiness", most=1)
    check_range(arguments, 1, "num_traces")
    check_range(arguments, 2, "tokens")
    rate = 0.9 if arguments.acceptance is None else arguments.acceptance
    if arguments.run_length is not None:
        rate = agreement_of_run_length(arguments.run_length)
    drawn = {"burstiness": 0.5, "num_traces": 12, "num_tokens": 256} | _given(
        burstiness=arguments.burstiness, num_traces=arguments.num_traces,
        num_tokens=arguments.tokens, seed=arguments.seed,
    )  # fmt: skip
    return drawn_traces(
        agreement=rate,
        num_prompt_tokens=num_prompt_tokens,
        num_draft_prompt_tokens=pair.num_draft_tokens if pair is not None else 0,
        **drawn,
    )


def _given(**options: Any) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
