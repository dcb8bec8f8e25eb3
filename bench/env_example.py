"""Writes ``.env.example``: ``python -m bench.env_example``.

Names and defaults come from the Compose files; explanations come from the services' settings and,
for variables of the stack itself, from ``STACK``.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from bench.environment import ROOT
from gateway.config import GatewaySettings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

GOAL = ROOT / ".env.example"
SETTINGS: dict[str, Any] = {
    "DRAFT": DraftSettings,
    "TARGET": TargetSettings,
    "GATEWAY": GatewaySettings,
}
HEAD = """\
# Every knob of the stack; `python -m bench.env_example` writes this file. Copy it to .env and take
# the "#" off what you change; what stays commented has the value shown. `docker compose config`
# shows what comes of it.

# Which files make up the stack: two GPUs here; one-gpu.yml, tensor-parallel.yml or cpu.yml take the
# place of two-gpus.yml. Add :deploy/compose/dashboard.yml to publish Grafana and Prometheus, and
# :deploy/compose/login.yml to ask for a password there.
COMPOSE_FILE=docker-compose.yml:deploy/compose/two-gpus.yml
"""
STACK = {
    "HIPPO_SERVED_NAME": "name in REST requests",
    "HIPPO_MODELS": "where weights lie (the hub's cache): a Docker volume, or the path of a folder "
    "of this machine that user 10001 may write",
    "HIPPO_HF_TOKEN_FILE": "a file with the token for gated models, readable by user 10001",
    "HIPPO_OFFLINE": "1: never ask the hub; everything must be in HIPPO_MODELS",
    "HF_ENDPOINT": "another hub than huggingface.co",
    "HIPPO_START_PERIOD": "time for the download and loading of a model",
    "HIPPO_DRAFT_GPU": "number or UUID by nvidia-smi",
    "HIPPO_TARGET_GPU": "number or UUID by nvidia-smi",
    "HIPPO_TARGET_SECOND_GPU": "tensor-parallel.yml: the target's second one",
    "HIPPO_GPU": "one-gpu.yml: the GPU of both",
    "HIPPO_DRAFT_CPUSET": "cpu.yml: cores, as 1 or 1-7 or 1,3; with several, as many threads",
    "HIPPO_TARGET_CPUSET": "cpu.yml: cores of the target",
    "HIPPO_SLOTS": "sequences at once, of both services (`hippo sizes`)",
    "HIPPO_MAX_CONTEXT_LENGTH": "longest prompt and answer together, of both services",
    "HIPPO_VISION_CACHE_MB": "of each device, for what the vision tower gave for earlier media",
    "HIPPO_MEDIA_CACHE_MB": "of the host, for each service, for the frames of earlier media",
    "HIPPO_PREFIX_CACHE": "false: every prompt is computed from its first token",
    "HIPPO_MAX_FRAMES": "most frames of a video, for both services",
    "HIPPO_API_KEYS_FILE": "a TOML file of API keys with their limits (docs/api.md), readable by "
    "user 10001; without keys everybody who reaches the gateway may ask",
    "HIPPO_MEDIA": "a folder of this machine whose files requests may name as /media/FILE",
    "HIPPO_DRAFT_MEMORY": "limit of the container; a model passes through the machine's memory "
    "while it loads: its weights and 4 GiB (cpu.yml: 4g)",
    "HIPPO_TARGET_MEMORY": "the same of the target's container (cpu.yml: 8g)",
    "HIPPO_GATEWAY_MEMORY": "limit of the container",
    "HIPPO_PROMETHEUS_MEMORY": "limit of the container",
    "HIPPO_GRAFANA_MEMORY": "limit of the container",
    "HIPPO_DRAFT_CPUS": "processor time in cores; 0: no limit",
    "HIPPO_TARGET_CPUS": "processor time in cores; 0: no limit",
    "HIPPO_GATEWAY_CPUS": "processor time in cores; 0: no limit",
    "HIPPO_SHM_SIZE": "shared memory of draft and target, where the ranks of a target meet",
    "HIPPO_BIND": "where the gateway is published; it asks for no key unless it is given keys",
    "HIPPO_PORT": "the gateway's port on this machine",
    "HIPPO_DASHBOARD_BIND": "dashboard.yml: where Grafana and Prometheus are published",
    "HIPPO_GRAFANA_PORT": "dashboard.yml: Grafana's port",
    "HIPPO_PROMETHEUS_PORT": "dashboard.yml: Prometheus' port",
    "HIPPO_GRAFANA_PASSWORD_FILE": "login.yml: a file with the administrator's password, readable "
    "by user 472",
    "HIPPO_LOG_LEVEL": "debug, info, warning or error; of all services",
    "HIPPO_LOG_STYLE": "json or text",
    "HIPPO_METRICS_RETENTION": "how long Prometheus keeps what it scraped",
    "HIPPO_ENGINE_IMAGE": "built under this name, or pulled (cpu.yml: hippo-engine:cpu)",
    "HIPPO_GATEWAY_IMAGE": "built under this name, or pulled",
    "HIPPO_PROMETHEUS_IMAGE": "pulled",
    "HIPPO_GRAFANA_IMAGE": "pulled",
    "HIPPO_BASE_IMAGE": "what our images are built on",
    "HIPPO_TORCH_INDEX": "where torch is taken from instead of PyPI's CUDA build (cpu.yml: "
    "https://download.pytorch.org/whl/cpu)",
}


def compose_files() -> list[Path]:
    """Returns the Compose files, docker-compose.yml first."""
    return [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy/compose").glob("*.yml"))]


def variables() -> dict[str, str]:
    """Returns every variable that an operator can set, with its default in docker-compose.yml, or
    else in the service's settings, or else in the Compose file that adds it."""
    found: dict[str, str] = {}
    for path in compose_files():
        text = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for service in yaml.safe_load(text)["services"].values():
            for name, value in service.get("environment", {}).items():
                if value is None:
                    found.setdefault(name, _setting(name)[1])
        for name, default in re.findall(r"\$\{(\w+)(?::?-([^}]*)|:\?[^}]*)?\}", text):
            found.setdefault(name, default)
    return found


def text() -> str:
    """Returns the content of ``.env.example``."""
    known = variables()
    if wrong := set(STACK) - set(known):
        raise SystemExit(f"no Compose file has {', '.join(sorted(wrong))}")
    parts = [HEAD, _section("The stack", {name: known[name] for name in STACK})]
    for service in SETTINGS:
        own = {
            name: default
            for name, default in known.items()
            if name.startswith(f"HIPPO_{service}_") and name not in STACK
        }
        parts.append(_section(f"The {service.lower()}", own))
    return "\n".join(parts)


def _section(title: str, knobs: dict[str, str]) -> str:
    lines = [f"# --- {title} {'-' * (91 - len(title))}"]
    for name, default in knobs.items():
        about = STACK.get(name) or _setting(name)[0]
        lines += [f"# {line}" for line in textwrap.wrap(about, 96)]
        lines.append(f"# {name}={default}")
    return "\n".join(lines) + "\n"


def _setting(name: str) -> tuple[str, str]:
    """Returns help and default of a service's setting; two "" for any other variable."""
    _, _, rest = name.partition("HIPPO_")
    service, _, field_name = rest.partition("_")
    for field in dataclasses.fields(SETTINGS.get(service, ())) if service in SETTINGS else ():
        if field.name == field_name.lower():
            default = "" if field.default is dataclasses.MISSING else field.default
            return str(field.metadata["help"]), _as_variable(default)
    return "", ""


def _as_variable(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(default)
    return "" if default is None else str(default)


if __name__ == "__main__":
    GOAL.write_text(text(), encoding="utf-8")
