"""``hippo ask``: one question, the answer as it comes, and what it took."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from hippo.cli.client import ShownAnswer, ask, media_part, served_model
from hippo.cli.compare import Comparison, compare, comparison_table
from hippo.errors import InvalidRequestError
from hippo.speculation.policies import POLICY_NAMES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  hippo ask clip.mp4 "Describe the video."
  hippo ask clip.mp4 "How many balls are there?" --max-tokens 32
  hippo ask clip.mp4 "Describe the video." --compare       measure against the target alone
  hippo ask clip.mp4 "Describe the video." --policy vpsd --gamma 5
  hippo ask clip.mp4 "Describe the video." --temperature 0.8 --seed 7
  hippo ask clip.mp4 "Describe the video." --json | jq .figures
  hippo ask "What can you do?"                             no video

The gateway must run: `hippo up`.
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "ask",
        help="ask a question about a video",
        description="Asks a running gateway and streams the answer, then a line of figures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="[VIDEO] QUESTION",
        help="a video or image (file or URL), and the question; or the question alone",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway's address")
    parser.add_argument("--policy", choices=POLICY_NAMES, help="default: the gateway's")
    parser.add_argument("--gamma", type=int, help="block length of serial and vpsd")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--fps", type=float, help="frames per second that are looked at")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="then time it and the target alone, in turn, both warm",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, with --compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Asks; the exit code."""
    if len(arguments.inputs) > 2:
        raise InvalidRequestError("expected a video and a question, in quotes")
    if arguments.repeats < 1:
        raise InvalidRequestError("--repeats must be at least 1")
    *videos, question = arguments.inputs
    content = [media_part(video) for video in videos] + [{"type": "text", "text": question}]
    speculative = {
        key: value
        for key, value in (("policy", arguments.policy), ("gamma", arguments.gamma))
        if value is not None
    }
    console = Console()
    with httpx.Client(base_url=arguments.url, trust_env=False, timeout=None) as client:
        body: dict[str, Any] = {
            "model": served_model(client),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "speculative": speculative,
        }
        if arguments.fps is not None:
            body["mm_processor_kwargs"] = {"fps": arguments.fps}
        comparison = None
        if arguments.json:
            answer = ask(client, body)
            if arguments.compare:
                comparison = compare(client, body, repeats=arguments.repeats)
            sys.stdout.write(json.dumps(_as_json(answer, comparison), indent=2) + "\n")
            return 0
        answer = ask_streaming(client, body)
        console.print(figures_line(answer), style="dim", highlight=False, soft_wrap=True)
        if arguments.compare:
            with Console(stderr=True).status("measuring ..."):
                comparison = compare(client, body, repeats=arguments.repeats)
            console.print(comparison_table(comparison))
    return 0


def ask_streaming(client: httpx.Client, body: Mapping[str, Any]) -> ShownAnswer:
    """Asks, with the answer on stdout as it comes."""

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = ask(client, body, on_text=show)
    sys.stdout.write("\n")
    return answer


def figures_line(answer: ShownAnswer) -> str:
    """What the answer took, in one line."""
    figures = answer.figures
    rate = (answer.num_tokens - 1) / answer.decode_s if answer.decode_s else 0.0
    parts = [
        f"{answer.num_tokens} tokens in {answer.end_to_end_s:.2f} s",
        f"first after {answer.first_text_s:.2f} s",
        f"then {rate:.0f} a second",
        f"policy {figures['policy']}",
    ]
    if figures["draft_used"]:
        parts += [
            f"{figures['mean_tokens_per_forward']:.2f} tokens a forward",
            f"{figures['acceptance_rate']:.0%} of {figures['num_draft_tokens']} draft tokens "
            "accepted",
        ]
    elif figures["draft_problem"]:
        parts.append(f"no draft: {figures['draft_problem']}")
    elif figures["is_calibration"]:
        parts.append("run target-only to measure the baseline, as a few requests are")
    return "; ".join(parts)


def _as_json(answer: ShownAnswer, comparison: Comparison | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
        "end_to_end_s": round(answer.end_to_end_s, 4),
        "first_text_s": round(answer.first_text_s, 4),
        "decode_s": round(answer.decode_s, 4),
        "figures": answer.figures,
    }
    if comparison is not None:
        result["comparison"] = comparison.as_dict()
    return result
