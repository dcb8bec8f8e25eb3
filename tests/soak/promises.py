"""What was promised to ordinary clients beside an attacker, and whether it was kept."""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from hippo.client.tables import number
from tests.support.watching.compose import ROOT, STACKS

QUIET = "nobody"
SERVICES = ("gateway", "draft", "target")
MAX_SLOWDOWN = 2.0
MAX_RECOVERY_S = 60.0  # until all is as before an attack


def compose_limits() -> dict[str, float]:
    """Megabytes that the Compose files for a machine without a GPU allow each service."""
    limits = {}
    for file in STACKS["cpu"]:
        services = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
        for name in SERVICES:
            if found := re.search(r":-(\d+)g}", services[name].get("mem_limit", "")):
                limits[name] = int(found[1]) * 2**30 / 1e6
    return limits


def worst(*phases: Mapping[str, Any]) -> dict[str, float]:
    """The longest seconds of an answer by the kind of question."""
    found: dict[str, float] = {}
    for phase in phases:
        for kind, seconds in phase["seconds"].items():
            found[kind] = max(*seconds, found.get(kind, 0.0))
    return found


def problems(result: Mapping[str, Any]) -> list[str]:
    """What was not as it must be, with the name of its phase."""
    return [
        f"{phase['name']}: {what}"
        for phase, quiet_s in _compared(result["phases"])
        for what in _problems(phase, quiet_s, result["limits_mb"])
    ]


def _compared(
    phases: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], dict[str, float]]]:
    """Each phase, with the longest answers of the quiet time around it."""
    for place, phase in enumerate(phases):
        around = [phase] if phase["name"] == QUIET else phases[place - 1 : place + 2 : 2]
        yield phase, worst(*around)


def _problems(
    phase: Mapping[str, Any], quiet_s: Mapping[str, float], limits_mb: Mapping[str, float]
) -> Iterator[str]:
    slowest = worst(phase)
    for kind, most_s in quiet_s.items():
        if kind not in slowest:
            yield f"no question about a {kind} was answered"
        elif slowest[kind] > MAX_SLOWDOWN * most_s:
            took, times = slowest[kind], slowest[kind] / most_s
            yield f"{took:.2f} s for a question about a {kind}, {times:.1f} times the quiet worst"
    for name, most_mb in phase["resident_mb"].items():
        if most_mb > limits_mb[name]:
            yield f"the {name} had {most_mb:,.0f} MB; its limit is {limits_mb[name]:,.0f} MB"
    for what, count in Counter(phase["faults"]).items():
        yield f"{count} × {what}"
    for name in phase["ended"]:
        yield f"the {name} ended"
    if phase["num_tracebacks"]:
        yield f"{phase['num_tracebacks']} × a traceback in the services' logs"
    if phase["name"] != QUIET and phase["recovered_s"] is None:
        yield f"not as fast as before within {MAX_RECOVERY_S:g} s"
    if attacker := phase["attacker"]:
        yield from attacker["broken"]
        if count := attacker["outcomes"].get("500"):
            yield f"{count} × status 500, a fault of the server"


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns, and rows of the first quiet phase and of each attack."""
    compared = list(_compared(result["phases"]))
    shown = [compared[0], *(pair for pair in compared if pair[0]["name"] != QUIET)]
    columns = [
        *("attack", "answers, equal"),
        *(f"{kind}: median, worst s (×)" for kind in shown[0][1]),
        *(f"{name}, MB of {result['limits_mb'][name]:,.0f}" for name in SERVICES),
        *("as before after s", "attacker's processor s", "attacker's replies"),
    ]
    return columns, [_row(phase, quiet_s) for phase, quiet_s in shown]


def _row(phase: Mapping[str, Any], quiet_s: Mapping[str, float]) -> list[str]:
    attacker = phase["attacker"] or {"cpu_s": None, "outcomes": {}}
    replies = [f"{count:,} {what}" for what, count in sorted(attacker["outcomes"].items())]
    return [
        phase["name"],
        f"{phase['num_answers']}, {phase['num_answers'] - len(phase['faults'])}",
        *(_latency(phase["seconds"].get(kind, ()), most_s) for kind, most_s in quiet_s.items()),
        *(f"{resident:,.0f}" for resident in phase["resident_mb"].values()),
        number(phase["recovered_s"], ".1f"),
        number(attacker["cpu_s"], ".1f"),
        ", ".join(replies) or "-",
    ]


def _latency(seconds: Sequence[float], quiet_s: float) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.2f}, {max(seconds):.2f} ({max(seconds) / quiet_s:.1f})"
