"""The tables of ``hippo simulate``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from hippo.simulation.machine import Machine
from hippo.simulation.pairs import NUM_NEW_TOKENS, ModelPair
from hippo.simulation.replay import Row
from hippo.sizes import GIB


def machine_table(machine: Machine) -> Table:
    """Returns a table of the machine's times in milliseconds."""
    table = Table(
        title=machine.name, caption="\n".join(machine.sources), caption_justify="left", min_width=60
    )
    table.add_column("milliseconds")
    table.add_column("target", justify="right")
    table.add_column("draft", justify="right")
    target, draft = machine.target, machine.draft
    table.add_row("step, one row", f"{target.one_row_ms:.3f}", f"{draft.one_row_ms:.3f}")
    for title, name in (
        ("  each further row", "row_ms"),
        ("  each 1,000 cached tokens", "kilotoken_ms"),
    ):
        table.add_row(title, *(_unless_zero(getattr(step, name)) for step in (target, draft)))
    table.add_row("prefill", f"{machine.target_prefill_ms:.1f}", f"{machine.draft_prefill_ms:.1f}")
    table.add_row("  may begin after", "-", _unless_zero(machine.selection_ms))
    for title, first, second in (
        ("a message, of the device", machine.target_message_ms, machine.draft_message_ms),
        ("between two steps", machine.target_scheduling_ms, 0.0),
        ("a message, one way", machine.leg_ms, machine.leg_ms),
    ):
        table.add_row(title, _unless_zero(first), _unless_zero(second))
    return table


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
        "towers, decoding of frames); efficiency: over the same policy without any overhead",
    )
    for column in (
        "policy", "decode", "end to\nend", "ms a\ntoken", "tokens/\nforward", "run\nlength",
        "target\nwaits", "ideal", "effi-\nciency",
    ):  # fmt: skip
        is_name = column == "policy"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=True)
    for row in rows:
        totals = row.totals
        table.add_row(
            row.policy.title,
            f"{row.decode_speedup:.2f}×",
            f"{row.end_to_end_speedup:.2f}×",
            f"{totals.ms_per_token:.3f}",
            f"{totals.tokens_per_forward:.2f}",
            f"{totals.run_length:.1f}",
            f"{totals.target_wait_share:.0%}",
            f"{row.decode_speedup / row.efficiency:.2f}×",
            f"{row.efficiency:.0%}",
        )
    return table


def row_figures(row: Row) -> dict[str, float | str]:
    """Returns the figures of a row of ``policy_table`` for JSON."""
    totals = row.totals
    return {
        "policy": row.policy.title,
        "gamma": row.policy.gamma,
        "decode_speedup": row.decode_speedup,
        "end_to_end_speedup": row.end_to_end_speedup,
        "ms_per_token": totals.ms_per_token,
        "ideal_ms_per_token": row.ideal.ms_per_token,
        "efficiency": row.efficiency,
        "mean_tokens_per_forward": totals.tokens_per_forward,
        "mean_run_length": totals.run_length,
        "acceptance_rate": totals.acceptance,
        "target_wait_share": totals.target_wait_share,
    }


def _unless_zero(value: float) -> str:
    return f"{value:.3f}" if value else "-"
