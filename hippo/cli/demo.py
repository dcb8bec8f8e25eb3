"""``hippo demo``: the bundled pair from start to measured speedup, in one command."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from hippo.cli.ask import ask_streaming, figures_line
from hippo.cli.client import media_part
from hippo.cli.compare import compare, comparison_table
from hippo.cli.stack import BUNDLED_CLIPS, Stack
from hippo.cli.up import add_stack_arguments, bring_up, log_printer, quiet, stack_options
from hippo.errors import InvalidRequestError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_QUESTION = "Describe the video."

_EXAMPLES = """\
examples:
  hippo demo
  hippo demo --video clip.mp4 --question "What moves?"
  hippo demo --verbose                       with the log of the three processes
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        help="start, ask about a bundled clip, measure against the target alone, stop",
        description="Starts the bundled pair on free ports, asks about a bundled clip, asks the "
        "target alone the same, prints the measured speedup and stops everything.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--video", help="default: a bundled clip")
    parser.add_argument("--question", default=_QUESTION, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--verbose", action="store_true", help="show the services' log")
    add_stack_arguments(parser, port=0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 only if the outputs were equal."""
    console = Console()
    status_console = Console(stderr=True)
    if arguments.repeats < 1:
        raise InvalidRequestError("--repeats must be at least 1")
    video = arguments.video or str(_bundled_clip())
    content = [media_part(video), {"type": "text", "text": arguments.question}]
    options = stack_options(arguments)
    # It measures the target alone itself.
    no_calibration = ("--calibration-share", "0")
    options = replace(options, gateway_args=(*no_calibration, *options.gateway_args))
    on_line = log_printer(status_console) if arguments.verbose else quiet
    with Stack(options, on_line) as stack:
        bring_up(stack, status_console)
        if options.draft_core is not None:
            # This client, too, keeps off the target's core.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {options.draft_core})
        body: dict[str, Any] = {
            "model": options.served_name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": arguments.max_tokens,
            "temperature": 0,
        }
        console.print(f"[bold]{Path(video).name}[/]: {arguments.question}\n", highlight=False)
        with httpx.Client(base_url=stack.url, trust_env=False, timeout=None) as client:
            answer = ask_streaming(client, body)
            console.print(figures_line(answer) + "\n", style="dim", highlight=False)
            with status_console.status("measuring, with the draft and without ...") as status:
                comparison = compare(
                    client,
                    body,
                    repeats=arguments.repeats,
                    on_run=lambda done: status.update(
                        f"measuring, with the draft and without: {done}/{arguments.repeats}"
                    ),
                )
        console.print(comparison_table(comparison))
    return 0 if comparison.is_equal else 1


def _bundled_clip() -> Path:
    clips = sorted(BUNDLED_CLIPS.glob("*.mp4"))
    if not clips:
        raise InvalidRequestError(
            f"there are no bundled clips in {BUNDLED_CLIPS}; give one with --video"
        )
    return clips[0]
