"""The machine, versions and commit of a measurement."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "grpcio", "fastapi", "uvicorn", "uvloop", "av")


def describe_environment() -> dict[str, object]:
    """Returns machine, versions, time, and commit (with "-dirty" if the tree has changes)."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("describe", "--always", "--dirty", "--abbrev=12"),
        "cpu": _cpu_model(),
        "num_cores_machine": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _git(*args: str) -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
