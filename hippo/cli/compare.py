"""``--compare``: times one question with and without the draft, and prints the speedup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console

from hippo.client.figures import summarise
from hippo.client.latency import Record, System, measure, num_answers
from hippo.client.requests import Question, RequestForm
from hippo.client.server import Server
from hippo.client.tables import latency_table, watched
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
    """Asks with and without the draft in turn, ``repeats`` times; returns the timed answers.

    Alternation makes a drift of the machine's speed affect both alike. ``console`` shows progress.
    Raises UnavailableError if the draft took no part in the last answer that asked for it.
    """
    # The gateway answers some requests without a policy target-only, to measure its baseline.
    policy = speculative.get("policy") or own_policy(server, form, question)
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
    """Whether all answers equal the target-only answers, token for token."""
    return all(record.is_equal for record in records)


def show(records: Sequence[Record], console: Console) -> None:
    """Prints a table of speedups and times, and whether the outputs are equal."""
    console.print(latency_table("", summarise(records)))
    console.print(
        "Outputs are equal."
        if is_equal(records)
        else "OUTPUTS DIFFER: expected in bfloat16 at times, never in float32."
    )


def own_policy(server: Server, form: RequestForm, question: Question) -> str:
    """Returns the gateway's default policy, as a one-token answer reports it."""
    short = replace(form, max_tokens=1)
    with closing(server.connect()) as connection:
        return str(connection.ask(short.request(question).body()).figures["policy"])
