"""Agreement traces: for each token of an answer, whether the draft proposes the target's token.

By the token rule a draft token is accepted exactly when it equals the target's, so a trace
determines every verdict under any policy.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hippo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one answer. ``agrees`` has an entry per token, the end token included.

    The numbers of prompt tokens are those that target and draft cache. ``fits`` tells of wrong
    draft tokens, by index, whether the draft's next token was the target's nevertheless.
    """

    agrees: tuple[bool, ...]
    num_prompt_tokens: int = 0
    num_draft_prompt_tokens: int = 0
    name: str = ""
    fits: Mapping[int, bool] = field(default_factory=dict)


def agreement_trace(
    rng: random.Random, num_tokens: int, agreement: float, burstiness: float
) -> list[bool]:
    """Draws for each token whether the draft agrees, at a mean rate of ``agreement``.

    With ``burstiness`` 0 the draws are independent. With 1 nearly all disagreements are in hard
    stretches, which make up a fifth of the text and have a mean length of five tokens.
    """
    share_hard, length_hard = 0.2, 5.0
    miss = 1 - agreement
    miss_hard = min(1.0, miss * (1 + burstiness * (1 / share_hard - 1)))
    miss_easy = (miss - share_hard * miss_hard) / (1 - share_hard)
    is_hard = rng.random() < share_hard
    trace = []
    for _ in range(num_tokens):
        leave = 1 / length_hard if is_hard else share_hard / (1 - share_hard) / length_hard
        if rng.random() < leave:
            is_hard = not is_hard
        trace.append(rng.random() >= (miss_hard if is_hard else miss_easy))
    return trace


def drawn_traces(
    *,
    agreement: float,
    num_traces: int,
    num_tokens: int,
    burstiness: float = 0.0,
    num_prompt_tokens: int = 0,
    num_draft_prompt_tokens: int = 0,
    seed: int = 0,
) -> list[Trace]:
    """Draws traces at a mean rate; the same arguments give the same traces."""
    return [
        Trace(
            tuple(agreement_trace(random.Random(f"{seed} {k}"), num_tokens, agreement, burstiness)),
            num_prompt_tokens,
            num_draft_prompt_tokens,
            f"drawn {k}",
        )
        for k in range(num_traces)
    ]


def agreement_of_run_length(mean_run_length: float) -> float:
    """Returns the rate of independent agreement that gives runs of this mean length.

    A run is the tokens settled between two rejections, the corrected token included, so a rate of
    ``a`` gives a mean of ``1 / (1 - a)`` (docs/algorithms.md). Raises InvalidRequestError for a
    length below 1.
    """
    if mean_run_length < 1:
        raise InvalidRequestError(
            f"a mean run length of {mean_run_length:g} cannot be: a run has its corrected token "
            "at least, so it is 1 or more"
        )
    return 1 - 1 / mean_run_length


def read_traces(path: Path, *, num_prompt_tokens: int = 0) -> list[Trace]:
    """Reads traces from a file with one per line: "0110...", or a JSON object with ``agrees``.

    JSON objects may have ``num_prompt_tokens``, ``num_draft_prompt_tokens`` and ``clip`` (or
    ``key``), as ``python -m bench.drafts.agreement`` and ``bench.pruning`` write them. Traces of a
    single token, which the prefill settles, are left out. Raises InvalidRequestError, with the
    number of the wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{path} is no text in UTF-8") from None
    traces = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            trace = _trace(line.strip(), f"{path}, line {number}", num_prompt_tokens)
            if len(trace.agrees) > 1:
                traces.append(trace)
    if not traces:
        raise InvalidRequestError(f"{path} has no trace of two tokens or more")
    return traces


def mean_agreement(traces: Sequence[Trace]) -> float:
    """Returns the share of all tokens on which the draft agrees."""
    return sum(sum(trace.agrees) for trace in traces) / sum(len(t.agrees) for t in traces)


def _trace(line: str, where: str, num_prompt_tokens: int) -> Trace:
    marks, name, lengths = line, where, (num_prompt_tokens, num_prompt_tokens)
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidRequestError(f"{where} is no JSON: {error}") from None
        marks = entry.get("agrees")
        name = str(entry.get("clip") or entry.get("key") or where)
        own = entry.get("num_prompt_tokens", num_prompt_tokens)
        lengths = (own, entry.get("num_draft_prompt_tokens", own))
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise InvalidRequestError(f"{where}: numbers of prompt tokens are integers from 0 on")
    if not isinstance(marks, str) or set(marks) - {"0", "1"} or not marks:
        raise InvalidRequestError(
            f'{where}: expected a trace such as 110111 ("1": the draft agrees), or a JSON object '
            'that has one as "agrees"'
        )
    return Trace(tuple(mark == "1" for mark in marks), *lengths, name)
