"""``hippo doctor``: reads a running gateway's metrics and reports what is wrong."""

from __future__ import annotations

import argparse
import time

import httpx
from rich.console import Console

from hippo.cli.diagnosis import Finding, Readings, Severity, diagnose, parse_scrape
from hippo.errors import InvalidRequestError, UnavailableError

HELP = "read a running gateway's figures and say what is wrong"
DESCRIPTION = (
    "Reads /metrics of a running gateway and says how fast the pair is, whether "
    "anything is wrong, which failure it is, and what to do."
)
EXAMPLES = """\
examples:
  hippo doctor http://127.0.0.1:8000                 all since the gateway started
  hippo doctor http://127.0.0.1:8000 --seconds 60    what happens in the next minute alone

exit code: 0 all is well, 1 something is wrong or nobody answers, 3 too little traffic to judge.
"""
_EXIT_CODES = {Severity.GOOD: 0, Severity.UNKNOWN: 3, Severity.PROBLEM: 1}
_STYLES = {Severity.GOOD: "green", Severity.UNKNOWN: "yellow", Severity.PROBLEM: "red"}
_MARKS = {Severity.GOOD: "ok", Severity.UNKNOWN: "??", Severity.PROBLEM: "!!"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    parser.add_argument("url", metavar="URL", help="the gateway's address")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="watch for S seconds (default: all since the start of the gateway)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns the exit code of the most serious finding."""
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise InvalidRequestError("--seconds must be above 0")
    with httpx.Client(base_url=arguments.url.rstrip("/"), trust_env=False, timeout=10) as client:
        readings = _fetch(client)
        if arguments.seconds is not None:
            with Console(stderr=True).status(f"watching for {arguments.seconds:g} s ..."):
                time.sleep(arguments.seconds)
            readings = _fetch(client).since(readings)
    findings = diagnose(readings)
    console = Console()
    for finding in findings:
        _show(console, finding)
    worst = max((finding.severity for finding in findings), key=lambda item: item.value)
    return _EXIT_CODES[worst]


def _fetch(client: httpx.Client) -> Readings:
    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise UnavailableError(f"no gateway answers at {client.base_url} ({error})") from None
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"{client.base_url} is no address: {error}") from None
    try:
        return parse_scrape(response.raise_for_status().text)
    except (httpx.HTTPStatusError, ValueError):
        raise UnavailableError(
            f"{client.base_url}/metrics is not a hippo gateway's; give the gateway's address"
        ) from None


def _show(console: Console, finding: Finding) -> None:
    mark, style = _MARKS[finding.severity], _STYLES[finding.severity]
    console.print(f"{mark} ", style=f"bold {style}", end="")
    console.print(finding.text, highlight=False, markup=False)
    if finding.advice:
        console.print(f"   {finding.advice}", style="dim", highlight=False, markup=False)
