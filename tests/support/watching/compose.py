"""The files of the stack in containers, and the programs that read them."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
# Compose v2, and 1.29.
COMPOSES = {"docker compose": ["docker", "compose"], "docker-compose": ["docker-compose"]}
BASE = "docker-compose.yml"
STACKS = {
    "gpus": (BASE, "deploy/compose/two-gpus.yml"),
    "one gpu": (BASE, "deploy/compose/one-gpu.yml"),
    "tensor parallel": (BASE, "deploy/compose/tensor-parallel.yml"),
    "prefill helper": (BASE, "deploy/compose/prefill-helper.yml"),
    "cpu": (BASE, "deploy/compose/cpu.yml"),
    "dashboard": (BASE, "deploy/compose/two-gpus.yml", "deploy/compose/dashboard.yml"),
}


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, as Compose v2 does; PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"given twice: {sorted(twice)}", node.start_mark
            )
        return super().construct_mapping(node, deep)


@functools.cache
def composes() -> set[str]:
    """Those of ``COMPOSES`` that are installed."""
    return {
        name
        for name, command in COMPOSES.items()
        if shutil.which(command[0])
        and subprocess.run([*command, "version"], capture_output=True).returncode == 0
    }


def compose_files() -> list[Path]:
    """Returns all Compose files, docker-compose.yml first."""
    return [ROOT / BASE, *sorted((ROOT / "deploy" / "compose").glob("*.yml"))]


def default_of(variable: str) -> str:
    """Returns the default of a variable of the stack, as .env.example shows it."""
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    [default] = re.findall(rf"^# {variable}=(.*)$", text, flags=re.MULTILINE)
    return str(default)


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without settings of ours, and with ``changes``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HIPPO_", "COMPOSE_"))}
    return {**clean, **changes}
