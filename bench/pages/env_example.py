"""Writes ``.env.example``: ``python -m bench.pages.env_example``.

Names and defaults come from the Compose files; explanations come from the services' settings, also
of a variable that several services take, and for variables of the stack itself from ``STACK``.
"""

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from bench.base.environment import ROOT
from gateway.common.config import GatewaySettings
from hippo.base.config import as_text
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

GOAL = ROOT / ".env.example"
COMPOSE = ROOT / "docker-compose.yml"
SETTINGS: dict[str, Any] = {
    "DRAFT": DraftSettings,
    "TARGET": TargetSettings,
    "GATEWAY": GatewaySettings,
}
HEAD = """\
# All settings of the stack; `python -m bench.pages.env_example` writes this file. Copy it to .env
# and uncomment what you change; commented lines show the defaults. `docker compose config` prints
# the result.

# Compose files: two GPUs here; for other machines replace two-gpus.yml by one-gpu.yml,
# tensor-parallel.yml, prefill-helper.yml or cpu.yml. Add :deploy/compose/dashboard.yml to publish
# Grafana and Prometheus, :deploy/compose/login.yml to require a Grafana password, and
# :deploy/compose/traces.yml to keep traces.
COMPOSE_FILE=docker-compose.yml:deploy/compose/two-gpus.yml
"""
STACK = {
    "HIPPO_SERVED_NAME": "model name in REST requests",
    "HIPPO_MODELS": "where weights are stored (the hub's cache): a Docker volume, or the path of a "
    "folder of this machine that user 10001 can write",
    "HIPPO_HF_TOKEN_FILE": "a file with the token for gated models, readable by user 10001",
    "HIPPO_OFFLINE": "1: never contact the hub; all files must be in HIPPO_MODELS",
    "HF_ENDPOINT": "hub URL other than huggingface.co",
    "HIPPO_START_PERIOD": "time for the download and loading of a model; failed health checks "
    "count only after it",
    "HIPPO_DRAFT_GPU": "the draft's GPU (index or UUID of nvidia-smi)",
    "HIPPO_TARGET_GPU": "the target's GPU (index or UUID)",
    "HIPPO_TARGET_SECOND_GPU": "tensor-parallel.yml: the target's second GPU",
    "HIPPO_GPU": "one-gpu.yml: the GPU of both models",
    "HIPPO_DRAFT_CPUSET": "cpu.yml: the draft's core; for several (1-7 or 1,3) set "
    "HIPPO_DRAFT_NUM_THREADS too",
    "HIPPO_TARGET_CPUSET": "cpu.yml: the target's core; for several set "
    "HIPPO_TARGET_NUM_THREADS too",
    "HIPPO_API_KEYS_FILE": "a TOML file of API keys with their limits (docs/api.md), readable by "
    "user 10001; without keys, any client that reaches the gateway may send requests",
    "HIPPO_MEDIA": "a folder of this machine whose files requests may name as /media/FILE",
    "HIPPO_UPLOADS": "where uploaded videos are stored: a Docker volume, or the path of a folder "
    "of this machine that user 10001 can write",
    "HIPPO_DRAFT_MEMORY": "host memory limit of the draft's container (cpu.yml: 4g); `hippo sizes` "
    "says what loading to a GPU takes of it; on a CPU it holds the weights and 4 GiB",
    "HIPPO_TARGET_MEMORY": "host memory limit of the target's container (cpu.yml: 8g)",
    "HIPPO_GATEWAY_MEMORY": "memory limit of the gateway's container",
    "HIPPO_PROMETHEUS_MEMORY": "memory limit of Prometheus' container",
    "HIPPO_GRAFANA_MEMORY": "memory limit of Grafana's container",
    "HIPPO_TEMPO_MEMORY": "traces.yml: memory limit of Tempo's container",
    "HIPPO_DRAFT_CPUS": "CPU limit of the draft, in cores; 0: none",
    "HIPPO_TARGET_CPUS": "CPU limit of the target, in cores; 0: none",
    "HIPPO_GATEWAY_CPUS": "CPU limit of the gateway, in cores; 0: none",
    "HIPPO_SHM_SIZE": "shared memory of draft and target, used by tensor-parallel ranks",
    "HIPPO_BIND": "address of this machine for the gateway's port; without API keys, access is "
    "open",
    "HIPPO_PORT": "the gateway's port on this machine",
    "HIPPO_DASHBOARD_BIND": "dashboard.yml: address of Grafana and Prometheus",
    "HIPPO_GRAFANA_PORT": "dashboard.yml: Grafana's port",
    "HIPPO_PROMETHEUS_PORT": "dashboard.yml: Prometheus' port",
    "HIPPO_GRAFANA_PASSWORD_FILE": "login.yml: a file with the administrator's password, readable "
    "by user 472",
    "HIPPO_METRICS_RETENTION": "how long Prometheus keeps metrics",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "URL of an OTLP collector (HTTP), such as "
    "http://collector:4318, for the spans of draft, target and gateway; empty: no traces "
    "(traces.yml: Tempo)",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers that the collector asks for, as name=value,name=value",
    "OTEL_TRACES_SAMPLER": "which requests are traced without a traceparent header, such as "
    "parentbased_traceidratio; empty: all",
    "OTEL_TRACES_SAMPLER_ARG": "the sampler's argument: the share of the requests, as 0.1",
    "OTEL_RESOURCE_ATTRIBUTES": "attributes of all spans, as name=value,name=value",
    "HIPPO_ENGINE_IMAGE": "image name to build or pull (cpu.yml: hippo-engine:cpu)",
    "HIPPO_GATEWAY_IMAGE": "image name to build or pull",
    "HIPPO_PROMETHEUS_IMAGE": "image to pull",
    "HIPPO_GRAFANA_IMAGE": "image to pull",
    "HIPPO_TEMPO_IMAGE": "traces.yml: image to pull",
    "HIPPO_BASE_IMAGE": "base image of hippo's two images",
    "HIPPO_TORCH_INDEX": "package index for torch instead of PyPI, which has the CUDA build "
    "(cpu.yml: https://download.pytorch.org/whl/cpu)",
    "HIPPO_EXTRA_PACKAGES": "packages to install into the engine image beside its own, such as "
    "gptqmodel optimum for GPTQ",
}


def compose_files() -> list[Path]:
    """Returns the Compose files, docker-compose.yml first."""
    return [COMPOSE, *sorted((ROOT / "deploy/compose").glob("*.yml"))]


def variables() -> dict[str, str]:
    """Returns every variable that an operator can set, with its default in docker-compose.yml, or
    else in the service's settings, or else in the Compose file that adds it."""
    found: dict[str, str] = {}
    for path in compose_files():
        text = _without_comments(path)
        for service in yaml.safe_load(text)["services"].values():
            for name, value in service.get("environment", {}).items():
                if value is None:
                    found.setdefault(name, _setting(name)[1])
        for name, default in re.findall(r"\$\{(\w+)(?::?-([^}]*)|:\?[^}]*)?\}", text):
            found.setdefault(name, default)
    return found


def shared() -> dict[str, str]:
    """Returns the explanation of each variable that several services take, as the settings of the
    last of them say it."""
    taken = re.findall(r'^ +(\w+): "\$\{(\w+):-[^}]*\}"', _without_comments(COMPOSE), re.MULTILINE)
    found = {
        variable: _setting(name)[0] for name, variable in taken if variable not in (*STACK, name)
    }
    return {variable: about for variable, about in found.items() if about}


def text() -> str:
    """Returns the content of ``.env.example``."""
    known, of_several = variables(), shared()
    if wrong := set(STACK) - set(known):
        raise SystemExit(f"no Compose file has {', '.join(sorted(wrong))}")
    sections: dict[str, dict[str, str]] = {"The stack": STACK, "Several services": of_several}
    for service in SETTINGS:
        sections[f"The {service.lower()}"] = {
            name: _setting(name)[0]
            for name in known
            if name.startswith(f"HIPPO_{service}_") and name not in {*STACK, *of_several}
        }
    return "\n".join([HEAD, *(_section(title, of, known) for title, of in sections.items())])


def _section(title: str, abouts: dict[str, str], known: dict[str, str]) -> str:
    lines = [f"# --- {title} {'-' * (91 - len(title))}"]
    for name, about in abouts.items():
        lines += [f"# {line}" for line in textwrap.wrap(about, 96)]
        lines.append(f"# {name}={known[name]}")
    return "\n".join(lines) + "\n"


def _setting(name: str) -> tuple[str, str]:
    """Returns help and default of a service's setting; two "" for any other variable."""
    _, service, field_name = f"{name}__".split("_", 2)
    for field in dataclasses.fields(SETTINGS[service]) if service in SETTINGS else ():
        if field.name == field_name.lower().rstrip("_"):
            default = "" if field.default is dataclasses.MISSING else as_text(field.default)
            choices = ", ".join(field.metadata["choices"])
            return field.metadata["help"] + (f" ({choices})" if choices else ""), default
    return "", ""


def _without_comments(path: Path) -> str:
    return re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


if __name__ == "__main__":
    GOAL.write_text(text(), encoding="utf-8")
