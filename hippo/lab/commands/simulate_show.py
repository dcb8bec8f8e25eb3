"""The tables of ``hippo simulate``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from hippo.catalog.sizes import GIB
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.pairs import NUM_NEW_TOKENS, ModelPair
from hippo.lab.simulation.replay import Row

SHOWN_ROWS = (1, 2, 8, 32)
"""Numbers of rows whose step times are shown."""


_COLUMNS = {
    "policy": ("policy", "{}"),
    "decode": ("decode_speedup", "{:.2f}×"),
    "end to\nend": ("end_to_end_speedup", "{:.2f}×"),
    "with\nhelper": ("helped_speedup", "{:.2f}×"),
    "ms a\ntoken": ("ms_per_token", "{:.3f}"),
    "tokens/\nforward": ("mean_tokens_per_forward", "{:.2f}"),
    "run\nlength": ("mean_run_length", "{:.1f}"),
    "target\nwaits": ("target_wait_share", "{:.0%}"),
    "effi-\nciency": ("efficiency", "{:.0%}"),
}


def machine_table(machine: Machine, pair: ModelPair | None) -> Table:
    """Returns a table of the machine's times in milliseconds, after the pair's prompt."""
    table = Table(
        title=machine.name, caption="\n".join(machine.sources), caption_justify="left", min_width=60
    )
    table.add_column("milliseconds")
    table.add_column("target", justify="right")
    table.add_column("draft", justify="right")
    for num_rows, target_ms, draft_ms in zip(
        SHOWN_ROWS, *step_times(machine, pair).values(), strict=True
    ):
        name = "step, one row" if num_rows == 1 else f"  {num_rows} rows"
        table.add_row(name, f"{target_ms:.3f}", f"{draft_ms:.3f}")
    table.add_row("prefill", f"{machine.target_prefill_ms:.1f}", f"{machine.draft_prefill_ms:.1f}")
    table.add_row("  may begin after", "-", _unless_zero(machine.selection_ms))
    if machine.helper_layers:
        title = f"prefill, {machine.helper_layers} layers on a helper"
        table.add_row(title, f"{machine.helped_prefill_ms:.1f}", "as above")
        table.add_row("  may begin after", "-", f"{machine.helped_selection_ms:.3f}")
    table.add_row("vision tower, before it", _unless_zero(machine.tower_ms), "-")
    for title, first, second in (
        ("a message, of the device", machine.target_message_ms, machine.draft_message_ms),
        ("between two steps", machine.target_scheduling_ms, 0.0),
        ("a message, one way", machine.leg_ms, machine.leg_ms),
    ):
        table.add_row(title, _unless_zero(first), _unless_zero(second))
    return table


def step_times(machine: Machine, pair: ModelPair | None) -> dict[str, list[float]]:
    """Returns the milliseconds of steps of SHOWN_ROWS after the pair's prompt, by model."""
    contexts = (pair.num_prompt_tokens, pair.num_draft_tokens) if pair is not None else (0, 0)
    return {
        name: [step.ms(num_rows, context) for num_rows in SHOWN_ROWS]
        for name, step, context in zip(
            ("target", "draft"), (machine.target, machine.draft), contexts, strict=True
        )
    }


def machine_figures(machine: Machine, pair: ModelPair | None) -> dict[str, Any]:
    """Returns the machine's times for JSON; step times as in ``step_times``."""
    figures = dataclasses.asdict(machine)
    del figures["target"], figures["draft"]
    steps = {f"{name}_step_ms": ms for name, ms in step_times(machine, pair).items()}
    return figures | {"step_rows": SHOWN_ROWS} | steps


def memory_table(pair: ModelPair) -> Table:
    """Returns a table of weights and KV cache on each device, beside the device's memory."""
    table = Table(title=f"{pair.title}: memory with {pair.num_visual_tokens:,} visual tokens")
    for column in ("", "GPUs", "weights GiB", "cache GiB", "on each GPU", "it has"):
        table.add_column(column, justify="left" if not column else "right")
    for name, shape, place, tokens in (
        ("target", pair.target, pair.target_place, pair.num_prompt_tokens),
        ("draft", pair.draft, pair.draft_place, pair.num_draft_tokens),
    ):
        num_tokens = tokens + NUM_NEW_TOKENS
        table.add_row(
            f"{name} {shape.name.rpartition('/')[2]}",
            f"{place.num_gpus} {place.gpu.name}",
            f"{shape.weight_bytes() / GIB:.1f}",
            f"{shape.cache_bytes(num_tokens) / GIB:.2f}",
            f"{place.memory_gib(shape, num_tokens):.1f}",
            f"{place.gpu.memory_gib:g}",
        )
    return table


def policy_table(rows: Sequence[Row], *, num_traces: int, agreement: float) -> Table:
    """Returns a table of predicted speedups, beside those without any overhead."""
    table = Table(
        title=f"predicted, {num_traces} answers, the draft agrees on {agreement:.1%}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="decode: first token to last; end to end: both prefills too (without vision "
        "towers, decoding of frames), also with a prefill helper; efficiency: over the same "
        "policy without any overhead",
    )
    for column in _COLUMNS:
        is_name = column == "policy"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=True)
    for row in rows:
        figures = row_figures(row)
        cells = ((figures[key], form) for key, form in _COLUMNS.values())
        table.add_row(*("-" if value is None else form.format(value) for value, form in cells))
    return table


def row_figures(row: Row) -> dict[str, Any]:
    """Returns the figures of a row of ``policy_table``, also for JSON."""
    totals = row.totals
    return {
        "policy": row.policy.title,
        "gamma": row.policy.gamma,
        "decode_speedup": row.decode_speedup,
        "end_to_end_speedup": row.end_to_end_speedup,
        "helped_speedup": row.helped_speedup,
        "ideal_speedup": row.decode_speedup / row.efficiency,
        "ms_per_token": totals.ms_per_token,
        "ideal_ms_per_token": row.ideal.ms_per_token,
        "efficiency": row.efficiency,
        "mean_tokens_per_forward": totals.mean_tokens_per_forward,
        "mean_run_length": totals.mean_run_length,
        "acceptance_rate": totals.acceptance,
        "target_wait_share": totals.target_wait_share,
    }


def _unless_zero(value: float) -> str:
    return f"{value:.3f}" if value else "-"
