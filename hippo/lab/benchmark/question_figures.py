"""Figures of answers to questions from a file, by category and system."""

from collections.abc import Mapping, Sequence

from hippo.client.answers import Answer
from hippo.client.figures import Row, share, summarise, summarise_alone
from hippo.client.latency import TARGET_ONLY, Record
from hippo.client.tables import interval, markdown, number
from hippo.lab.benchmark.video_questions import VideoQuestion

ALL = "all questions"
Answers = Mapping[tuple[str, str], Answer]  # by question's id and system's name


def records_of(
    questions: Sequence[VideoQuestion],
    answers: Answers,
    systems: Sequence[str],
    *,
    temperature: float,
) -> list[Record]:
    """Returns a gateway's answers with the target-only answer of the same question as baseline."""
    records = []
    for question in questions:
        alone = answers[question.id, TARGET_ONLY]
        records += [
            Record(
                clip=question.id,
                system=system,
                temperature=temperature,
                answer=answers[question.id, system],
                baseline_decode_s=alone.decode_s,
                baseline_end_to_end_s=alone.end_to_end_s,
                baseline_ids=alone.token_ids,
            )
            for system in systems
        ]
    return records


def summarise_questions(
    questions: Sequence[VideoQuestion],
    answers: Answers,
    systems: Sequence[str],
    *,
    records: Sequence[Record] | None,
) -> list[Row]:
    """Returns a row per category and system, and a row per system of all questions at the end.

    ``records`` come from ``records_of``; None for a server that is no gateway, whose rows
    come from ``summarise_alone``. Each row has `num_right` of `num_scored` answers, and
    `num_unlike` answers that are scored otherwise than the first system's.
    """
    categories = sorted({question.category for question in questions if question.category})
    rows = []
    for category in (*categories, ALL):
        chosen = [each for each in questions if category in (each.category, ALL)]
        if records is None:
            found = [
                summarise_alone(system, [answers[each.id, system] for each in chosen])
                for system in systems
            ]
        else:
            ids = {each.id for each in chosen}
            found = summarise([record for record in records if record.clip in ids])
        for row in found:
            first, own = (
                [each.is_right(answers[each.id, system].text) for each in chosen]
                for system in (systems[0], row["system"])
            )
            rows.append(
                {
                    "category": category,
                    **row,
                    "num_scored": sum(each is not None for each in own),
                    "num_right": own.count(True),
                    "num_unlike": sum(a != b for a, b in zip(first, own, strict=True)),
                }
            )
    return rows


def table_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the head and the cells of a table of rows of ``summarise_questions``."""
    cells = _alone_cells if "decode_speedup" not in rows[0] else _gateway_cells
    table = [
        {"category": row["category"], "system": row["system"], "asked": str(row["num_answers"])}
        | cells(row)
        | {"score": _score(row)}
        for row in rows
    ]
    return [tuple(table[0]), *(tuple(line.values()) for line in table)]


def _alone_cells(row: Row) -> dict[str, str]:
    return {
        "TTFT ms": f"{row['ttft_ms']['mean']:.0f}",
        "ms/token": f"{row['ms_per_token']['mean']:.2f}",
        "tokens/s": f"{row['tokens_per_s']['mean']:.1f}",
    }


def _gateway_cells(row: Row) -> dict[str, str]:
    return {
        "decode ×": interval(row["decode_speedup"]),
        "end to end ×": interval(row["end_to_end_speedup"]),
        "TTFT ms": f"{row['ttft_ms']:.0f}",
        "tokens/forward": number(row["mean_tokens_per_forward"], ".2f"),
        "run length": number(row["mean_run_length"], ".1f"),
        "equal": f"{row['num_equal']}/{row['num_answers']}",
    }


def page_of(title: str, table: Sequence[Sequence[str]]) -> str:
    """Returns a page with the table; the first two columns are aligned left."""
    head, *rows = table
    return f"{title}\n\n{markdown(head, rows, num_names=2)}\n"


def _score(row: Row) -> str:
    part = share(row["num_right"], row["num_scored"])
    return "-" if part is None else f"{row['num_right']}/{row['num_scored']} {part:.1%}"
