"""``hippo bench``: measures the speed of a running server over its REST API."""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.cli.stack import bundled_clips
from hippo.client.latency import TARGET_ONLY, System
from hippo.client.requests import Question, RequestForm, question_about
from hippo.client.server import KEY_VARIABLE, Server
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.plots import check_plot
from hippo.lab.benchmark.video_questions import read_questions
from hippo.lab.commands.bench_questions import QuestionFile
from hippo.lab.commands.bench_run import Bench, Plan
from hippo.lab.commands.options import (
    check_folders,
    check_positive,
    check_range,
    flag_of,
    refuse,
    write_text,
)
from hippo.lab.simulation.replay import parse_policies

HELP = "measure a running server: latency side by side, many clients, or a file of questions"
DESCRIPTION = """\
Measures a running server over REST, as its users see it. A hippo gateway is asked the same
questions target-only and with its draft in turn: how many times as fast, and whether the answers
are equal, token for token. Any other OpenAI-compatible server is timed alone. With --concurrency,
that many clients ask at once, again and again. With --questions, the questions of a file are asked
once each and the answers are scored.
"""
EXAMPLES = """\
examples:
  hippo bench                                         the pair that `hippo up` serves
  hippo bench --policies adaptive,vpsd:7,serial:10 --rounds 3 --plot speedup.svg
  hippo bench --video a.mp4 b.mp4 --prompt "What happens?" --temperature 0.8
  hippo bench --url http://vllm:8000 --no-video --prompt "Tell me about hippos."

examples, many clients:
  hippo bench --concurrency 1,2,4,8 --out load.json --plot load.png
  hippo bench --concurrency 16 --policies adaptive --requests 200
  HIPPO_API_KEY=... hippo bench --url https://example.com/v1 --concurrency 1,4 --seconds 60

examples, questions of a file:
  hippo bench --questions mvbench.jsonl --videos MVBench/video --answers mvbench.answers.jsonl
  hippo bench --questions q.jsonl --answers a.jsonl --policies adaptive,vpsd:7 --limit 100
  hippo bench --questions q.jsonl --answers a.jsonl --videos file:///data --max-tokens 16

A line of the file: {"id": "1", "video": "a.mp4", "question": "What colour is it?",
"options": ["red", "blue"], "answer": "A", "category": "colour"}. The last three may be missing; an
answer may also be an option's text. `prompt`, if there, is sent in place of question and options.
`hippo questions` makes such files of benchmarks. The same command goes on after a stop.

The client takes processor time, too: run it on a core that draft and target do not use.
"""
_PROMPT = "Describe the video in detail."
_GREETING = "Hello."  # for the probe where a file has the questions
_SECONDS = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add("--model", help="default: the first one that it serves")
    add("--api-key", metavar="KEY", help=f"better given in {KEY_VARIABLE}: others can see commands")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds of silence after which a request fails (default: 600)",
    )
    group = parser.add_argument_group("questions")
    add = group.add_argument
    videos = group.add_mutually_exclusive_group().add_argument
    videos("--video", nargs="+", metavar="VIDEO", help="files or URLs (default: bundled clips)")
    videos("--no-video", action="store_true", help="text only, for a server without videos")
    videos("--questions", type=Path, metavar="FILE", help="a JSONL file of questions; see below")
    add("--prompt", action="append", help="may be given several times; each is asked of each video")
    add("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the first question; each further question has the next seed",
    )
    add(
        "--allow-cache",
        action="store_true",
        help="let the server reuse what it keeps of an earlier request; else each is asked with a "
        "cache_salt of its own, where the server takes that",
    )
    add(
        "--policies",
        help="of a hippo gateway, such as adaptive,vpsd:7,serial:10,off (default: adaptive; with "
        "--concurrency off,adaptive)",
    )
    group = parser.add_argument_group("questions of a file")
    add = group.add_argument
    add("--answers", type=Path, metavar="FILE", help="each answer is appended; those there stay")
    add(
        "--videos",
        metavar="FOLDER",
        help="of the file's videos, or the URL before their names, such as file:///data for a "
        "server that may open them itself (default: the file's folder)",
    )
    add("--limit", type=int, help="ask only the first so many")
    add("--markdown", type=Path, metavar="FILE", help="write the table by category")
    group = parser.add_argument_group("latency, one question at a time")
    add = group.add_argument
    add("--rounds", type=int, help="times that all questions are asked (default: 1)")
    group = parser.add_argument_group("load, many clients at once")
    add = group.add_argument
    add("--concurrency", metavar="N,N,...", help="numbers of clients, such as 1,2,4,8")
    end = group.add_mutually_exclusive_group().add_argument
    end("--requests", type=int, help="requests of each load, after one warm-up request per client")
    end("--seconds", type=float, help=f"seconds of each load (default: {_SECONDS:g})")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--out", metavar="FILE", help="write all figures as JSON; - for standard output")
    add("--plot", type=Path, metavar="FILE", help="draw them, as .svg or .png")


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes the results; returns the exit code."""
    plan = plan_of(arguments)
    is_json_shown = arguments.out == "-"
    bench = Bench(plan, Console(stderr=is_json_shown), Console(stderr=True))
    origin = {"command": command_line(arguments), "client": _environment()}
    text = json.dumps({**origin, **bench.run()}, indent=1) + "\n"
    if is_json_shown:
        sys.stdout.write(text)
    elif arguments.out is not None:
        write_text(Path(arguments.out), text)
        bench.say(f"written to {arguments.out}")
    return 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Returns the plan that the options describe.

    Raises InvalidRequestError for an option that is out of range or has no effect.
    """
    concurrency = _concurrency(arguments.concurrency)
    _check(arguments, has_load=bool(concurrency))
    check_folders(arguments, "out", "plot", "answers", "markdown")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    seconds = arguments.seconds
    if concurrency and arguments.requests is None and seconds is None:
        seconds = _SECONDS
    form = RequestForm(
        model=arguments.model or "",
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
    )
    if arguments.allow_cache:
        optional = tuple(name for name in form.optional if name != "cache_salt")
        form = replace(form, optional=optional)
    file = None if arguments.questions is None else _file(arguments)
    return Plan(
        server=Server(
            arguments.url,
            api_key=arguments.api_key or os.environ.get(KEY_VARIABLE) or None,
            timeout_s=arguments.timeout,
        ),
        form=form,
        questions=_questions(arguments) if file is None else (question_about(_GREETING),),
        policies=_policies(arguments.policies),
        rounds=arguments.rounds or 1,
        concurrency=concurrency,
        requests=arguments.requests,
        seconds=seconds,
        plot=arguments.plot,
        file=file,
    )


def _file(arguments: argparse.Namespace) -> QuestionFile:
    questions = read_questions(arguments.questions, arguments.videos)
    return QuestionFile(
        path=arguments.questions,
        questions=tuple(questions[: arguments.limit]),
        seed=arguments.seed,
        answers=arguments.answers,
        markdown=arguments.markdown,
        plot=arguments.plot,
    )


def _check(arguments: argparse.Namespace, *, has_load: bool) -> None:
    check_range(arguments, 1, "max_tokens", "rounds", "requests", "limit")
    check_range(arguments, 0, "seed", "temperature")
    check_positive(arguments, "seconds", "timeout")
    if has_load:
        refuse(arguments, ["rounds"], "has no effect with --concurrency")
    else:
        refuse(arguments, ["requests", "seconds"], "needs --concurrency")
    if arguments.questions is None:
        refuse(arguments, ["answers", "videos", "limit", "markdown"], "needs --questions")
    else:
        names = ["prompt", "rounds", "concurrency"]
        refuse(arguments, names, "has no effect with --questions")
        if arguments.answers is None:
            raise InvalidRequestError(
                "--questions needs --answers FILE, to which each answer is appended"
            )
    if arguments.no_video and not arguments.prompt:
        raise InvalidRequestError("--no-video needs a --prompt")


def _concurrency(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise InvalidRequestError(f"--concurrency {text}: expected numbers such as 1,2,4,8")
    return counts


def _policies(text: str | None) -> tuple[System, ...] | None:
    if text is None:
        return None
    systems = []
    for choice in parse_policies(text):
        if choice.gamma == 0:
            raise InvalidRequestError(
                f"--policies {text}: a draft length is a number or auto, as in {choice.name}:7"
            )
        if choice.name == "off":
            systems.append(System(TARGET_ONLY, {"policy": "off"}))
        elif choice.name in ("serial", "vpsd"):
            speculative = {"policy": choice.name, "gamma": choice.gamma}
            systems.append(System(choice.title, speculative))
        else:
            systems.append(System(choice.name, {"policy": choice.name}))
    if len({system.name for system in systems}) < len(systems):
        raise InvalidRequestError(f"--policies {text}: a policy stands there twice")
    return tuple(systems)


def _questions(arguments: argparse.Namespace) -> tuple[Question, ...]:
    """Returns each prompt with each video; without --prompt, a bundled clip has its own."""
    if arguments.no_video:
        return tuple(question_about(text, seed=arguments.seed) for text in arguments.prompt)
    clips = [(video, _PROMPT) for video in arguments.video or ()] or bundled_clips()
    return tuple(
        question_about(prompt, video, name=_shown(video), seed=arguments.seed)
        for video, own_prompt in clips
        for prompt in arguments.prompt or [own_prompt]
    )


def _shown(video: str) -> str:
    return "data:..." if video.startswith("data:") else video.rsplit("/", 1)[-1]


def command_line(arguments: argparse.Namespace) -> str:
    """Returns the shell command for the arguments, without defaults and without the API key."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    words = ["hippo", "bench"]
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if name == "api_key" or value == default:
            continue
        option = flag_of(name)
        if value is True:
            words.append(option)
        elif name == "prompt":
            words += [word for prompt in value for word in (option, prompt)]
        else:
            words += [option, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def _environment() -> dict[str, Any]:
    """Returns the time, the versions and the machine of this client."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "hippo": importlib.metadata.version("hippo-serve"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "num_cores": os.cpu_count(),
    }
