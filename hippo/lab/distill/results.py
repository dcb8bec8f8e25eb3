"""What a training has brought: the pair served before and after, and what a simulation predicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hippo.client.figures import summarise
from hippo.client.latency import TARGET_ONLY, Record, System, measure, num_answers
from hippo.client.requests import RequestForm, question_about
from hippo.client.server import Server
from hippo.client.tables import interval, markdown
from hippo.errors import HippoError
from hippo.lab.distill.answers import TargetAnswer
from hippo.lab.distill.questions import TargetQuestion
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import PolicyChoice, compare
from hippo.lab.simulation.traces import Trace, mean_agreement

Figures = dict[str, Any]

_ROWS: Mapping[str, str] = {
    "agreement": "agreement",
    "tokens_per_forward": "tokens/forward",
    "run_length": "run length",
    "predicted_speedup": "decode ×, predicted",
    "decode_speedup": "decode ×, measured",
    "end_to_end_speedup": "end to end ×",
    "equal": "equal answers",
}
_POLICY = "adaptive"
_SYSTEM = System(_POLICY, {"policy": _POLICY})


def num_measured(questions: Sequence[TargetQuestion]) -> int:
    """Returns the number of records that ``measure_pair`` yields."""
    return num_answers([_SYSTEM], len(questions))


def measure_pair(
    url: str, questions: Sequence[TargetQuestion], *, served_name: str, max_tokens: int
) -> Iterator[Record]:
    """Asks a running pair each question target-only and with its draft, as `hippo bench` does;
    yields the records. Raises HippoError if the server fails."""
    form = RequestForm(model=served_name, max_tokens=max_tokens, is_hippo=True)
    asked = [
        question_about(question.prompt, f"file://{question.video.resolve()}", name=question.id)
        for question in questions
    ]
    return measure(Server(url), form, asked, [_SYSTEM])


def figures_of(records: Sequence[Record]) -> Figures:
    """Returns the figures of the answers with the draft, and the times for ``predicted``.

    Raises HippoError if the pair has a draft problem in all of them, or no answer has two tokens.
    """
    drafted = [record.figures for record in records if record.system != TARGET_ONLY]
    if all(each["draft_problem"] for each in drafted):
        raise HippoError(f"the draft took no part in the answers: {drafted[-1]['draft_problem']}")
    alone = [record.figures["timings_ms"] for record in records if record.system == TARGET_ONLY]
    steps_ms = [each["target_step"] for each in alone if each["target_step"]]
    num_forwards = sum(each["num_forwards"] for each in drafted)
    if not steps_ms or not num_forwards:
        raise HippoError("all answers have one token: there is no decoding to speed up")
    *_, row = summarise(records)
    num_verified = sum(each["num_draft_tokens"] + each["num_reused_tokens"] for each in drafted)
    num_further = num_verified / num_forwards
    step_ms = statistics.fmean(steps_ms)
    forward_ms = sum(each["timings_ms"]["target_forward"] for each in drafted) / num_forwards
    return {
        "tokens_per_forward": row["mean_tokens_per_forward"],
        "run_length": row["mean_run_length"],
        "decode_speedup": row["decode_speedup"],
        "end_to_end_speedup": row["end_to_end_speedup"],
        "num_equal": row["num_equal"],
        "num_answers": row["num_answers"],
        "target_step_ms": step_ms,
        "target_row_ms": max(0.0, forward_ms - step_ms) / num_further if num_further else 0.0,
        "draft_step_ms": row["draft_step_ms"],
        "transport_ms_per_round": row["transport_ms_per_round"],
    }


def traces_of(marks: Mapping[str, str], answers: Mapping[str, TargetAnswer]) -> list[Trace]:
    """Returns the traces of answers of two tokens or more, for the simulator."""
    return [
        Trace(
            tuple(mark == "1" for mark in trace),
            answers[name].num_prompt_tokens,
            answers[name].num_draft_prompt_tokens,
            name,
        )
        for name, trace in marks.items()
        if len(trace) > 1
    ]


def predicted(traces: Sequence[Trace], figures: Figures) -> Figures:
    """Returns the agreement of traces, and the decode speedup that the simulator predicts of them
    with the measured step times; None if the draft has made no step."""
    agreement = mean_agreement(traces)
    if figures["draft_step_ms"] is None:
        return {"agreement": agreement, "predicted_speedup": None}
    machine = Machine(
        name="measured",
        target=ForwardTime(one_row_ms=figures["target_step_ms"], row_ms=figures["target_row_ms"]),
        draft=ForwardTime(one_row_ms=figures["draft_step_ms"]),
        target_scheduling_ms=max(0.0, figures["transport_ms_per_round"]),
    )
    (row,) = compare([PolicyChoice(_POLICY)], traces, machine)
    return {"agreement": agreement, "predicted_speedup": row.decode_speedup}


def table_of(title: str, before: Figures, after: Figures) -> Table:
    """Returns a table of both for the terminal; speedups have their 95 % intervals."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _rows(before, after):
        table.add_row(*row)
    return table


def markdown_of(title: str, before: Figures, after: Figures) -> str:
    """Returns a page with the same table."""
    return f"{title}\n\n{markdown(('', 'before', 'after'), _rows(before, after))}\n"


def _rows(before: Figures, after: Figures) -> list[tuple[str, str, str]]:
    return [(title, _cell(before, key), _cell(after, key)) for key, title in _ROWS.items()]


def _cell(figures: Figures, key: str) -> str:
    if key == "equal":
        return f"{figures['num_equal']}/{figures['num_answers']}"
    value = figures[key]
    if isinstance(value, dict):
        return interval(value)
    if value is None:
        return "-"
    return f"{value:.2%}" if key == "agreement" else f"{value:.2f}"
