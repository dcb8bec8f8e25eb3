"""The same question with and without the draft, in turn, and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console

from hippo.benchmark.figures import summarise
from hippo.benchmark.latency import Record, System, measure, num_answers
from hippo.benchmark.requests import Question, RequestForm
from hippo.benchmark.server import Server
from hippo.benchmark.tables import latency_table, watched
from hippo.errors import UnavailableError


def compare(
    server: Server,
    form: RequestForm,
    question: Question,
    speculative: Mapping[str, Any],
    *,
    repeats: int,
    console: Console,
) -> list[Record]:
    """Timed answers of both in turn, ``repeats`` times, so that drift hits them alike; ``console``
    shows how far it is.

    Raises UnavailableError when the draft took no part in answers that asked for it.
    """
    # Answers to requests that name no policy are now and then the target's alone, for a baseline.
    policy = speculative.get("policy") or _own_policy(server, form, question)
    system = System(policy, {**speculative, "policy": policy})
    records = watched(
        measure(server, form, [question] * repeats, [system]),
        console,
        title="with the draft and without",
        total=num_answers([system], repeats),
    )
    last = records[-1].figures
    if policy != "off" and not last["draft_used"] and last["draft_problem"]:
        raise UnavailableError(f"nothing to compare, no draft: {last['draft_problem']}")
    return records


def is_equal(records: Sequence[Record]) -> bool:
    """Whether all answers are the same, token for token."""
    return all(record.is_equal for record in records)


def show(records: Sequence[Record], console: Console) -> None:
    """Speedups, times and equality, to be read by people."""
    console.print(latency_table("", summarise(records)))
    console.print(
        "Outputs are equal."
        if is_equal(records)
        else "OUTPUTS DIFFER: expected in bfloat16 at times, never in float32."
    )


def _own_policy(server: Server, form: RequestForm, question: Question) -> str:
    """What the gateway takes where none is named, told by an answer of one token."""
    short = replace(form, max_tokens=1)
    with closing(server.connect()) as connection:
        return str(connection.ask(short.request(question).body()).figures["policy"])
