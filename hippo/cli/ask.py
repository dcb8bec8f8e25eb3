"""``hippo ask``: asks one question, streams the answer, and prints its figures; with ``--compare``
times it with and without the draft, and prints the speedup."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.cli.record import Recorder
from hippo.client.answers import Answer
from hippo.client.figures import summarise
from hippo.client.latency import Record, System, measure, num_answers
from hippo.client.requests import Question, RequestForm, question_about
from hippo.client.server import KEY_VARIABLE, Server
from hippo.client.tables import latency_table, watched
from hippo.client.uploads import sent_media
from hippo.errors import InvalidRequestError, UnavailableError
from hippo.speculation.policies import POLICY_NAMES, Gamma

HELP = "ask a question about a video"
DESCRIPTION = "Asks a running gateway and streams the answer, then a line of figures."
EXAMPLES = """\
examples:
  hippo ask clip.mp4 "Describe the video."
  hippo ask clip.mp4 "How many balls are there?" --max-tokens 32
  hippo ask clip.mp4 "Describe the video." --compare       measure against the target alone
  hippo ask clip.mp4 "Describe the video." --policy vpsd --gamma 5
  hippo ask clip.mp4 "Describe the video." --temperature 0.8 --seed 7
  hippo ask clip.mp4 "Describe the video." --json | jq .figures
  hippo ask clip.mp4 "Describe the video." --record run.html    a file that replays the answer
  hippo ask "What can you do?"                             no video

The gateway must run: `hippo up`. If it asks for a key, give one in HIPPO_API_KEY.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="[VIDEO] QUESTION",
        help="a video or image (file or URL), and the question; or the question alone",
    )
    add("--url", default="http://127.0.0.1:8000", help="the gateway's address")
    add("--policy", choices=POLICY_NAMES, help="default: the gateway's")
    add("--gamma", type=_draft_length, help="draft length of serial and vpsd: a number, or auto")
    add("--no-thinking", action="store_true", help="an answer without a thought before")
    add("--max-tokens", type=int, default=256, help="default: %(default)s")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--fps", type=float, help="sampled frames per second")
    add(
        "--compare",
        action="store_true",
        help="then time this answer and the target alone, alternating, after a warm-up",
    )
    add("--repeats", type=int, default=3, help="timed runs of each, with --compare")
    add(
        "--record",
        type=lambda text: Path(text).expanduser(),
        metavar="FILE.html",
        help="then ask the target alone as well, and write one HTML file that replays both answers "
        "with the timeline of the devices and the kept visual tokens; it needs no server",
    )
    add("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    if len(arguments.inputs) > 2:
        raise InvalidRequestError("expected a video and a question, in quotes")
    if arguments.repeats < 1:
        raise InvalidRequestError("--repeats must be at least 1")
    wishes = {"policy": arguments.policy, "gamma": arguments.gamma}
    speculative = {name: value for name, value in wishes.items() if value is not None}
    if (path := arguments.record) is not None:
        if path.suffix.lower() not in (".html", ".htm"):
            raise InvalidRequestError(f"--record is {path}; its name must end in .html")
        if not path.parent.is_dir():
            raise InvalidRequestError(f"--record: there is no folder {path.parent}")
        if arguments.policy == "off":
            raise InvalidRequestError("--record compares with the target alone: --policy is off")
    server = Server(arguments.url, api_key=os.environ.get(KEY_VARIABLE) or None)
    *videos, text = arguments.inputs
    with ExitStack() as sent:
        media = [
            sent.enter_context(sent_media(server, each, Console(stderr=True))) for each in videos
        ]
        question = question_about(text, *media, seed=arguments.seed)
        return _answer(arguments, server, question, speculative)


def _draft_length(text: str) -> Gamma:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor auto")
    return int(text)


def _answer(
    arguments: argparse.Namespace,
    server: Server,
    question: Question,
    speculative: dict[str, Any],
) -> int:
    further: dict[str, Any] = {}
    if arguments.fps is not None:
        further["mm_processor_kwargs"] = {"fps": arguments.fps}
    if arguments.no_thinking:
        further["chat_template_kwargs"] = {"enable_thinking": False}
    form = RequestForm(
        model=server.models()[0],
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        is_hippo=True,
        further=further,
    )
    console, is_recorded = Console(), arguments.record is not None
    if is_recorded:
        speculative["policy"] = _policy(server, form, question, speculative)
        recorder = Recorder(server, form, question, speculative)
    body = recorder.body if is_recorded else form.request(question, speculative).body()
    answer = ask(server, body, is_shown=not arguments.json)
    if not arguments.json:
        console.print(figures_line(answer), style="dim", highlight=False, soft_wrap=True)
    if is_recorded:
        *videos, text = arguments.inputs
        note = (
            f"{speculative['policy']}, temperature {form.temperature:g}, "
            f"seed {arguments.seed}, at most {form.max_tokens} tokens"
        )
        recorder.write(arguments.record, answer, text=text, videos=videos, note=note)
        note = f"written to {arguments.record}"
        Console(stderr=True).print(note, style="dim", highlight=False, soft_wrap=True)
    records = []
    if arguments.compare:
        records = compare(server, form, question, speculative, repeats=arguments.repeats)
    if arguments.json:
        found = {
            "text": answer.text,
            **({"reasoning": answer.thought} if answer.thought else {}),
            "finish_reason": answer.finish_reason,
            "num_tokens": answer.num_tokens,
            "end_to_end_s": round(answer.end_to_end_s, 4),
            "first_text_s": round(answer.ttft_s, 4),
            "decode_s": round(answer.decode_s, 4),
            "figures": answer.figures,
        }
        if records:
            found["comparison"] = {
                "is_equal": is_equal(records),
                "summary": summarise(records),
                "records": [record.as_dict() for record in records],
            }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif records:
        show(records, console)
    return 0


def ask(server: Server, body: bytes, *, is_shown: bool = True) -> Answer:
    """Returns the answer to a request; if ``is_shown``, also streams its text to stdout, on a
    terminal its thought dim."""

    def show(text: str, is_thought: bool) -> None:
        is_dim = is_thought and sys.stdout.isatty()
        sys.stdout.write(f"\x1b[2m{text}\x1b[22m" if is_dim else text)
        sys.stdout.flush()

    with closing(server.connect()) as connection:
        answer = connection.ask(body, on_text=show if is_shown else None)
    if is_shown:
        sys.stdout.write("\n")
    return answer


def figures_line(answer: Answer) -> str:
    """Returns one line with the tokens, times and acceptance rate of an answer."""
    figures = answer.figures
    rate = 1 / answer.decode_s_per_token if answer.decode_s_per_token else 0.0
    parts = [
        f"{answer.num_tokens} tokens in {answer.end_to_end_s:.2f} s",
        f"first after {answer.ttft_s:.2f} s",
        f"then {rate:.0f} a second",
        f"policy {figures['policy']}",
    ]
    if figures["draft_used"]:
        num_accepted = figures["num_accepted_tokens"] + figures["num_accepted_reused"]
        num_verified = figures["num_draft_tokens"] + figures["num_reused_tokens"]
        parts += [
            f"{figures['mean_tokens_per_forward']:.2f} tokens/forward",
            f"{num_accepted / num_verified:.0%} of {num_verified} draft tokens accepted",
        ]
    elif figures["draft_problem"]:
        parts.append(f"no draft: {figures['draft_problem']}")
    elif figures["is_calibration"]:
        parts.append("run target-only to measure the baseline, as a few requests are")
    return "; ".join(parts)


def compare(
    server: Server,
    form: RequestForm,
    question: Question,
    speculative: Mapping[str, Any],
    *,
    repeats: int,
) -> list[Record]:
    """Asks with and without the draft in turn, ``repeats`` times; returns the timed answers.

    Alternation makes a drift of the machine's speed affect both alike. Raises UnavailableError if
    the draft took no part in the last answer that asked for it.
    """
    policy = _policy(server, form, question, speculative)
    system = System(policy, {**speculative, "policy": policy})
    records = watched(
        measure(server, form, [question] * repeats, [system]),
        Console(stderr=True),
        title="with the draft and without",
        total=num_answers([system], repeats),
    )
    last = records[-1].figures
    if policy != "off" and not last["draft_used"] and last["draft_problem"]:
        raise UnavailableError(f"nothing to compare, no draft: {last['draft_problem']}")
    return records


def is_equal(records: Sequence[Record]) -> bool:
    return all(record.is_equal for record in records)


def show(records: Sequence[Record], console: Console) -> None:
    """Prints a table of speedups and times, and whether the outputs are equal."""
    console.print(latency_table("", summarise(records)))
    console.print(
        "Outputs are equal."
        if is_equal(records)
        else "OUTPUTS DIFFER: expected in bfloat16 at times, never in float32."
    )


def _policy(
    server: Server, form: RequestForm, question: Question, speculative: Mapping[str, Any]
) -> str:
    """Returns the policy that is asked for, or else the gateway's, as a one-token answer reports
    it: the gateway answers some requests without a policy target-only, to measure its baseline."""
    if "policy" in speculative:
        return str(speculative["policy"])
    body = replace(form, max_tokens=1).request(question).body()
    return str(ask(server, body, is_shown=False).figures["policy"])
