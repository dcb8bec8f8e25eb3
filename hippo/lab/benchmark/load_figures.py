"""The row of the table of loads: throughput, and percentiles of the waits."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from hippo.client.answers import Answer
from hippo.client.figures import Row, percentile, share
from hippo.errors import HippoError
from hippo.lab.benchmark.load import LoadRun


def summarise_load(run: LoadRun, references: Mapping[int, tuple[int, ...]]) -> Row:
    """Returns a row of the table of loads.

    ``references`` are the expected token ids by question index; empty if the server does not send
    token ids. Raises HippoError if no request was answered inside the window.
    """
    answers = [answer for _, answer in run.counted]
    errors = Counter(run.errors)
    if not answers:
        raise HippoError(f"no request was answered: {errors.most_common(1)[0][0]}")
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    num_drafted = _total(answers, "num_draft_tokens")
    num_forwards = _total(answers, "num_forwards")
    num_accepted = _total(answers, "num_accepted_tokens")
    num_reused = _total(answers, "num_accepted_reused")
    num_right = None if num_accepted is None else num_accepted + (num_reused or 0.0)
    accepted_per_forward = share(num_right, num_forwards)
    return {
        "num_answers": len(answers),
        "num_errors": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "seconds": run.seconds,
        "tokens_per_s": sum(answer.num_tokens for answer in answers) / run.seconds,
        "answers_per_s": len(answers) / run.seconds,
        "tokens_per_answer": statistics.fmean(answer.num_tokens for answer in answers),
        "ttft_ms": _percentiles([answer.ttft_s for answer in answers]),
        "tpot_ms": _percentiles([answer.tpot_s for answer in answers]),
        "gap_ms": {**_percentiles(gaps), "max": 1e3 * max(gaps)} if gaps else None,
        "num_equal": sum(a.token_ids == references[index] for index, a in run.counted)
        if references
        else None,
        "acceptance_rate": share(num_accepted, num_drafted),
        "tokens_per_forward": None if num_forwards is None else 1 + (accepted_per_forward or 0.0),
        "dropped_share": share(
            _total(answers, "num_dropped_tokens"), _total(answers, "num_drafted_tokens")
        ),
        "counted_by": sorted({answer.counted_by for answer in answers}),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": 1e3 * percentile(seconds, 0.5), "p99": 1e3 * percentile(seconds, 0.99)}


def _total(answers: Sequence[Answer], key: str) -> float | None:
    """Returns the sum of a gateway's figure; None if no gateway sent figures."""
    values = [answer.figures.get(key, 0) for answer in answers if answer.figures]
    return float(sum(values)) if values else None
