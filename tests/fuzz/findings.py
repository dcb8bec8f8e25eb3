"""What a fuzzing run counts."""

import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil


def num_children() -> int:
    """Processes that this one started and that are still there, ended ones not waited for too."""
    return len(psutil.Process().children())


@dataclass
class Findings:
    """Outcomes by kind, and each failure with what repeats it."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)  # one of each input
    failures: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def fail(self, number: int, what: str, **more: Any) -> None:
        """A failure at input ``number``."""
        self.failures.append({"input": number, "what": what, **more})

    def note_resources(self, when: str) -> None:
        """Keeps what this process holds now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.figures[f"MiB {when}"] = pages * resource.getpagesize() / 2**20
        self.figures[f"descriptors {when}"] = len(list(Path("/proc/self/fd").iterdir()))
