"""What a second question about a clip, and the second turn of a conversation, are spared.

    python -m bench.reuse                       eight clips a kind, float32
    python -m bench.reuse --num-clips 2         a look

Draft, gateway and this client run on one core, the target on another. Each second question and
second turn is asked twice: *cold*, with a salt of its own, so that nothing cached is used, and
*warm*, after a first question with the same salt. Every answer is compared with the target's own,
cold, token for token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from bench.client import Answer, converse, user_turn, video_url
from bench.clips import Clip, Kind, held_out_clips
from bench.environment import ROOT, describe_environment
from bench.runs import bundled_pair, running_stack
from hippo.benchmark.tables import wide_console

SECOND_QUESTION = "Which objects move?"
MAX_TOKENS = 64
KINDS: tuple[Kind, ...] = ("short", "long")
POLICIES = ("off", "adaptive")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Record:
    """One pair of answers, cold and warm; times are seconds."""

    clip: str
    kind: str
    policy: str
    case: str  # "question" or "turn"
    is_video_first: bool
    num_prompt_tokens: int
    num_cached_tokens: int  # by the target, warm
    cold_ttft_s: float
    warm_ttft_s: float
    cold_prefill_s: float  # the target's device, vision tower included
    warm_prefill_s: float
    cold_draft_prefill_s: float | None
    warm_draft_prefill_s: float | None
    preprocess_s: float  # decoding and processor of the target, warm: not spared
    is_equal: bool  # both are the target's own, cold

    @property
    def group(self) -> tuple[str, str, str, bool]:
        """What is reported together."""
        return self.kind, self.policy, self.case, self.is_video_first


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-clips", type=int, default=8, help="held-out clips a kind")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out/reuse.json")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    options = bundled_pair(args.dtype)
    console = wide_console()
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, running_stack(options) as url:
        for kind in KINDS:
            clips = held_out_clips(Path(folder) / kind, kind=kind, num_clips=args.num_clips)
            with console.status(f"{kind} prompts ..."):
                records += measure(url, kind, clips)
    rows = summarise(records)
    console.print(table(rows))
    result = {
        "command": " ".join(["python -m bench.reuse", *(sys.argv[1:] if argv is None else argv)]),
        "environment": describe_environment(),
        "dtype": args.dtype,
        "summary": rows,
        "records": [asdict(record) for record in records],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {args.out}")


def measure(url: str, kind: str, clips: Sequence[Clip]) -> Iterator[Record]:
    """Both cases of every clip under every policy."""
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:

        def ask(messages: Messages, policy: str, salt: str | None = None) -> Answer:
            return converse(
                client,
                messages,
                speculative={"policy": policy},
                max_tokens=MAX_TOKENS,
                cache_salt=salt,
            )

        for policy in POLICIES:  # warms up
            ask([_first(clips[0])], policy)
        for clip in clips:
            first = _first(clip)
            answer = ask([first], "off")
            cases: dict[str, Messages] = {
                "question": [
                    user_turn(
                        video_url(clip.path), SECOND_QUESTION, is_video_first=clip.is_video_first
                    )
                ],
                "turn": [
                    first,
                    {"role": "assistant", "content": answer.text},
                    user_turn(None, SECOND_QUESTION),
                ],
            }
            for case, messages in cases.items():
                own = ask(messages, "off").token_ids
                for policy in POLICIES:
                    cold = ask(messages, policy)
                    salt = uuid.uuid4().hex
                    ask([first], policy, salt)
                    warm = ask(messages, policy, salt)
                    yield _record(clip, kind, policy, case, cold, warm, own)


def _first(clip: Clip) -> dict[str, Any]:
    return user_turn(video_url(clip.path), clip.question, is_video_first=clip.is_video_first)


def _record(
    clip: Clip,
    kind: str,
    policy: str,
    case: str,
    cold: Answer,
    warm: Answer,
    own: tuple[int, ...],
) -> Record:
    def seconds(answer: Answer, name: str) -> float | None:
        value = answer.figures["timings_ms"][name]
        return None if value is None else value / 1e3

    return Record(
        clip=clip.path.name,
        kind=kind,
        policy=policy,
        case=case,
        is_video_first=clip.is_video_first,
        num_prompt_tokens=warm.num_prompt_tokens,
        num_cached_tokens=warm.figures["num_cached_tokens"]["target"],
        cold_ttft_s=cold.ttft_s,
        warm_ttft_s=warm.ttft_s,
        cold_prefill_s=seconds(cold, "target_prefill") or 0.0,
        warm_prefill_s=seconds(warm, "target_prefill") or 0.0,
        cold_draft_prefill_s=seconds(cold, "draft_prefill"),
        warm_draft_prefill_s=seconds(warm, "draft_prefill"),
        preprocess_s=seconds(warm, "target_preprocess") or 0.0,
        is_equal=cold.token_ids == warm.token_ids == own,
    )


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Medians of each group; times in milliseconds."""
    rows = []
    for group in dict.fromkeys(record.group for record in records):
        members = [record for record in records if record.group == group]

        def median(name: str, members: Sequence[Record] = members) -> float | None:
            values = [getattr(record, name) for record in members]
            known = [value for value in values if value is not None]
            return statistics.median(known) if known else None

        times = {
            name.removesuffix("_s") + "_ms": None if value is None else round(1e3 * value, 2)
            for name in Record.__slots__
            if name.endswith("_s")
            for value in [median(name)]
        }
        kind, policy, case, is_video_first = group
        rows.append(
            {
                "kind": kind,
                "policy": policy,
                "case": case,
                "is_video_first": is_video_first,
                "num_pairs": len(members),
                "num_equal": sum(record.is_equal for record in members),
                "num_prompt_tokens": median("num_prompt_tokens"),
                "num_cached_tokens": median("num_cached_tokens"),
                **times,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The medians, to be read by people."""
    made = Table(
        title="Time to first token of what is asked second, cold and warm (medians, ms)",
        title_justify="left",
        caption="prefill: the device's, vision tower included; preparation: decoding and processor",
        caption_justify="left",
    )
    made.add_column("prompts, policy, second ...")
    headings = ("equal", "prompt", "cached", "TTFT cold", "warm", "spared", "target prefill cold",
                "warm", "draft prefill cold", "warm", "preparation")  # fmt: skip
    for heading in headings:
        made.add_column(heading, justify="right")
    for row in rows:
        order = "" if row["is_video_first"] else ", question before video"
        made.add_row(
            f"{row['kind']}, {row['policy']}, {row['case']}{order}",
            f"{row['num_equal']} of {row['num_pairs']}",
            f"{row['num_prompt_tokens']:.0f}",
            f"{row['num_cached_tokens']:.0f}",
            _ms(row["cold_ttft_ms"]),
            _ms(row["warm_ttft_ms"]),
            f"{1 - row['warm_ttft_ms'] / row['cold_ttft_ms']:.0%}",
            _ms(row["cold_prefill_ms"]),
            _ms(row["warm_prefill_ms"]),
            _ms(row["cold_draft_prefill_ms"]),
            _ms(row["warm_draft_prefill_ms"]),
            _ms(row["preprocess_ms"]),
        )
    return made


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
