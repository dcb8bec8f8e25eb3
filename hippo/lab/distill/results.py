"""What a training has brought: the pair served before and after."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hippo.client.figures import summarise
from hippo.client.latency import TARGET_ONLY, Record, System, measure, num_answers
from hippo.client.requests import RequestForm, question_about
from hippo.client.server import Server
from hippo.client.tables import interval, markdown
from hippo.errors import HippoError
from hippo.lab.distill.questions import TargetQuestion

Figures = dict[str, Any]

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
    """Returns the figures of the answers with the draft.

    Raises HippoError if the pair has a draft problem in all of them, or no answer has two tokens.
    """
    drafted = [record.figures for record in records if record.system != TARGET_ONLY]
    if all(each["draft_problem"] for each in drafted):
        raise HippoError(f"the draft took no part in the answers: {drafted[-1]['draft_problem']}")
    if not any(each["num_forwards"] for each in drafted):
        raise HippoError("all answers have one token: there is no decoding to speed up")
    *_, row = summarise(records)
    return {
        "tokens_per_forward": row["mean_tokens_per_forward"],
        "run_length": row["mean_run_length"],
        "decode_speedup": row["decode_speedup"],
        "end_to_end_speedup": row["end_to_end_speedup"],
        "num_equal": row["num_equal"],
        "num_answers": row["num_answers"],
    }


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


def _rows(before: Figures, after: Figures) -> list[tuple[str, ...]]:
    both = (before, after)
    return [
        ("agreement", *(f"{each['agreement']:.2%}" for each in both)),
        ("tokens/forward", *(f"{each['tokens_per_forward']:.2f}" for each in both)),
        ("run length", *(f"{each['run_length']:.2f}" for each in both)),
        ("decode ×", *(interval(each["decode_speedup"]) for each in both)),
        ("end to end ×", *(interval(each["end_to_end_speedup"]) for each in both)),
        ("equal answers", *(f"{each['num_equal']}/{each['num_answers']}" for each in both)),
    ]
