"""``hippo demo``: starts the bundled pair, asks about a clip, and measures the speedup."""

import argparse
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hippo.cli.ask import ask, compare, figures_line, is_equal, show
from hippo.cli.stack import Stack, bundled_clips
from hippo.cli.up import add_stack_arguments, bring_up, log_printer, quiet, stack_options
from hippo.client.requests import RequestForm, question_about
from hippo.client.server import Server
from hippo.errors import InvalidRequestError

_QUESTION = "Describe the video."

HELP = "start, ask about a bundled clip, measure against the target alone, stop"
DESCRIPTION = (
    "Starts the bundled pair on free ports, asks about a bundled clip, asks the "
    "target alone the same, prints the measured speedup and stops everything."
)
EXAMPLES = """\
examples:
  hippo demo
  hippo demo --video clip.mp4 --question "What moves?"
  hippo demo --verbose                       with the log of the three processes
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--video", help="default: a bundled clip")
    parser.add_argument("--question", default=_QUESTION, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--verbose", action="store_true", help="show the services' log")
    add_stack_arguments(parser, port=0)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code, which is 0 only if the outputs are equal."""
    console, status_console = Console(), Console(stderr=True)
    if arguments.repeats < 1:
        raise InvalidRequestError("--repeats must be at least 1")
    video = arguments.video or min(bundled_clips())[0]
    question = question_about(arguments.question, video)
    options = stack_options(arguments)
    on_line = log_printer(status_console) if arguments.verbose else quiet
    # The demo measures target-only itself, so the gateway need not.
    no_calibration = ("--calibration-share", "0")
    options = replace(options, gateway_args=(*no_calibration, *options.gateway_args))
    with Stack(options, on_line) as stack:
        bring_up(stack, status_console)
        if options.draft_core is not None:
            # Keeps this client off the target's core.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {options.draft_core})
        console.print(f"[bold]{Path(video).name}[/]: {arguments.question}\n", highlight=False)
        server = Server(stack.url)
        form = RequestForm(
            model=options.served_name, max_tokens=arguments.max_tokens, is_hippo=True
        )
        answer = ask(server, form.request(question).body())
        console.print(figures_line(answer) + "\n", style="dim", highlight=False)
        records = compare(server, form, question, {}, repeats=arguments.repeats)
    show(records, console)
    return 0 if is_equal(records) else 1
