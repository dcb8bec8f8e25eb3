"""The same question with and without the draft, in turn, and what that says."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table

from hippo.cli.client import ShownAnswer, ask
from hippo.errors import UnavailableError

_MOST_CALIBRATIONS = 4  # one after another; their share is far below one half


@dataclass(frozen=True, slots=True)
class Comparison:
    """Timed answers of target-only decoding and of the pair."""

    target_only: tuple[ShownAnswer, ...]
    speculative: tuple[ShownAnswer, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all outputs are the same text with the same number of tokens."""
        outputs = {
            (answer.text, answer.num_tokens, answer.finish_reason)
            for answer in (*self.target_only, *self.speculative)
        }
        return len(outputs) == 1

    @property
    def decode_speedup(self) -> float:
        """Ratio of the median times from first token to last; 1 if there was but one token."""
        return _ratio(self, lambda answer: answer.decode_s)

    @property
    def end_to_end_speedup(self) -> float:
        """Ratio of the median times from the request to the last byte."""
        return _ratio(self, lambda answer: answer.end_to_end_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "is_equal": self.is_equal,
            "decode_speedup": round(self.decode_speedup, 3),
            "end_to_end_speedup": round(self.end_to_end_speedup, 3),
            "target_only": [_times(answer) for answer in self.target_only],
            "speculative": [_times(answer) for answer in self.speculative],
        }


def compare(
    client: httpx.Client,
    body: Mapping[str, Any],
    *,
    repeats: int,
    on_run: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Runs both alternately, so that drift hits them alike, after one run of each to warm up.

    Raises UnavailableError when the draft took no part in runs that asked for it.
    """
    alone = {**body, "speculative": {"policy": "off"}}
    _ask_anew(client, alone)
    _ask_pair(client, body)
    target_only, speculative = [], []
    for done in range(repeats):
        on_run(done)
        target_only.append(_ask_anew(client, alone))
        speculative.append(_ask_pair(client, body))
    last = speculative[-1].figures
    if last["policy"] != "off" and not last["draft_used"] and last["draft_problem"]:
        raise UnavailableError(f"nothing to compare, no draft: {last['draft_problem']}")
    return Comparison(tuple(target_only), tuple(speculative))


def _ask_anew(client: httpx.Client, body: Mapping[str, Any]) -> ShownAnswer:
    return ask(client, {**body, "cache_salt": uuid.uuid4().hex})  # nothing cached helps it


def _ask_pair(client: httpx.Client, body: Mapping[str, Any]) -> ShownAnswer:
    """An answer that the gateway did not choose to run target-only for its baseline."""
    for _ in range(_MOST_CALIBRATIONS):
        answer = _ask_anew(client, body)
        if not answer.figures["is_calibration"]:
            return answer
    raise UnavailableError(
        "nothing to compare: the gateway runs these requests target-only to measure its baseline; "
        "name a --policy, or lower its --calibration-share"
    )


def comparison_table(comparison: Comparison) -> Table:
    """Times, rates, speedups and equality, to be read by people."""
    alone, pair = comparison.target_only, comparison.speculative
    repeats = len(alone)
    table = Table(
        title=f"Median of {repeats} runs each, in turn" if repeats > 1 else None,
        title_justify="left",
        caption="Outputs are equal."
        if comparison.is_equal
        else "OUTPUTS DIFFER: expected in bfloat16 at times, never in float32.",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("target alone", f"with draft ({pair[0].figures['policy']})", "speedup"):
        table.add_column(heading, justify="right")
    table.add_row(
        "decode only",
        f"{_median(alone, _decode):.3f} s",
        f"{_median(pair, _decode):.3f} s",
        f"[bold]{comparison.decode_speedup:.2f}x[/]",
    )
    table.add_row(
        "end to end",
        f"{_median(alone, _end_to_end):.3f} s",
        f"{_median(pair, _end_to_end):.3f} s",
        f"[bold]{comparison.end_to_end_speedup:.2f}x[/]",
    )
    table.add_row(
        "time to first token",
        f"{_median(alone, lambda answer: answer.first_text_s):.3f} s",
        f"{_median(pair, lambda answer: answer.first_text_s):.3f} s",
        "",
    )
    table.add_row(
        "tokens a second (decode)",
        f"{_median(alone, _rate):.0f}",
        f"{_median(pair, _rate):.0f}",
        "",
    )
    figures = pair[-1].figures
    table.add_row(
        "tokens a target forward", "1.00", f"{figures['mean_tokens_per_forward']:.2f}", ""
    )
    table.add_row("draft tokens accepted", "", f"{figures['acceptance_rate']:.0%}", "")
    table.add_row("tokens", str(alone[-1].num_tokens), str(pair[-1].num_tokens), "")
    return table


def _decode(answer: ShownAnswer) -> float:
    return answer.decode_s


def _end_to_end(answer: ShownAnswer) -> float:
    return answer.end_to_end_s


def _rate(answer: ShownAnswer) -> float:
    return (answer.num_tokens - 1) / answer.decode_s if answer.decode_s else 0.0


def _median(answers: tuple[ShownAnswer, ...], value: Callable[[ShownAnswer], float]) -> float:
    return statistics.median(map(value, answers))


def _ratio(comparison: Comparison, value: Callable[[ShownAnswer], float]) -> float:
    pair = _median(comparison.speculative, value)
    return _median(comparison.target_only, value) / pair if pair else 1.0


def _times(answer: ShownAnswer) -> dict[str, float]:
    return {
        "decode_s": round(answer.decode_s, 4),
        "end_to_end_s": round(answer.end_to_end_s, 4),
        "first_text_s": round(answer.first_text_s, 4),
    }
