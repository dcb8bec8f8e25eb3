"""The table of the papers' pairs: serial, vpsd and adaptive at their best draft lengths."""

import dataclasses
import itertools
from collections.abc import Iterator

from hippo.lab.simulation.hardware import GPUS
from hippo.lab.simulation.pairs import ModelPair, find_pair
from hippo.lab.simulation.replay import PolicyChoice, compare, parse_policies

AGREEMENT = 0.87
HEAD = (
    *("pair (draft / target)", "options", "step ms, target / draft", "second row, ms"),
    *("serial, decode (γ)", "vpsd, decode (γ)", "adaptive, decode", "adaptive, end to end"),
)
HELPER_HEAD = (
    *("GPU", "pair (draft / target)", "helper's layers", "tower, s", "first token, s"),
    *("with the helper, s", "shorter", "adaptive, end to end", "with the helper"),
)
_ROWS = (
    ("qwen-7b-72b", "h200", True),
    ("qwen-7b-72b-nf4", "h100", True),
    ("qwen-3b-72b-nf4", "h100", True),
    ("qwen-7b-32b", "h200", True),
    ("qwen-7b-32b", "h200", False),
    ("qwen-3b-32b", "h200", True),
    ("qwen-3b-7b", "h200", True),
    ("llava-0.5b-7b", "h200", True),
    ("llava-0.5b-7b", "h200", False),
)
_HELPED = ("qwen-7b-32b", "qwen-3b-32b", "qwen-7b-72b-nf4")


def pair_rows() -> Iterator[tuple[str, ...]]:
    """Yields the rows below ``HEAD``."""
    for name, gpu, has_graphs in _ROWS:
        pair = dataclasses.replace(find_pair(name), gpu=GPUS[gpu], has_graphs=has_graphs)
        options = f"--pair {name}" + ("" if gpu == "h200" else f" --gpu {gpu}")
        yield _row(pair, f"`{options}`" if has_graphs else f"`{options} --eager`")


def helper_rows() -> Iterator[tuple[str, ...]]:
    """Yields the rows below ``HELPER_HEAD``."""
    for gpu, name in itertools.product(("a100", "h200"), _HELPED):
        machine = (pair := dataclasses.replace(find_pair(name), gpu=GPUS[gpu])).machine()
        tower, prefill = machine.tower_ms, machine.target_prefill_ms
        helped = machine.helped_prefill_ms
        (row,) = compare([PolicyChoice("adaptive")], pair.traces(AGREEMENT), machine)
        yield (
            *(gpu, pair.title, f"{machine.helper_layers} of {pair.target.num_layers}"),
            *(f"{ms / 1e3:.2f}" for ms in (tower, tower + prefill, tower + helped)),
            f"{(prefill - helped) / (tower + prefill):.0%}",
            *(f"{row.end_to_end_speedup:.2f}", f"{row.helped_speedup:.2f}"),
        )


def _row(pair: ModelPair, options: str) -> tuple[str, ...]:
    machine = pair.machine()
    rows = compare(
        parse_policies("serial:best,vpsd:best,adaptive"), pair.traces(AGREEMENT), machine
    )
    one, two = (machine.target.ms(rows, pair.num_prompt_tokens) for rows in (1, 2))
    draft = machine.draft.ms(1, pair.num_draft_tokens)
    serial, vpsd, adaptive = rows
    return (
        *(pair.title, options, f"{one:.1f} / {draft:.1f}", f"{two - one:.1f}"),
        *(f"{each.decode_speedup:.2f} ({each.policy.gamma})" for each in (serial, vpsd)),
        *(f"{adaptive.decode_speedup:.2f}", f"{adaptive.end_to_end_speedup:.2f}"),
    )
