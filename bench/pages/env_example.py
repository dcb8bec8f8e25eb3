"""Writes ``.env.example``: ``python -m bench.pages.env_example``.

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

from bench.base.environment import ROOT
from gateway.common.config import GatewaySettings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

GOAL = ROOT / ".env.example"
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
# tensor-parallel.yml or cpu.yml. Add :deploy/compose/dashboard.yml to publish Grafana and
# Prometheus, :deploy/compose/login.yml to require a Grafana password, and
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
    "HIPPO_SLOTS": "concurrent sequences, for both services (`hippo sizes`)",
    "HIPPO_MAX_CONTEXT_LENGTH": "most tokens of prompt and answer together, for both services",
    "HIPPO_VISION_CACHE_MB": "device memory for the vision features of earlier media, per service; "
    "auto: 256, or more if one longest prompt needs more; 0: off",
    "HIPPO_MEDIA_CACHE_MB": "host memory for the frames of earlier media, per service; auto, 0: as "
    "above",
    "HIPPO_PREFIX_CACHE": "false: cached prompt prefixes are not reused",
    "HIPPO_VIDEO_FPS": "frames sampled per second if a request does not say, for both services; 0: "
    "the model's default",
    "HIPPO_VIDEO_AS_SHOWN": "true: the models see videos as players show them (high dynamic range, "
    "anamorphic, interlaced), for both services; false: as they are stored",
    "HIPPO_MAX_FRAMES": "most frames that a request may sample from a video, for both services",
    "HIPPO_MAX_VIDEO_PIXELS": "most pixels of a sampled frame after resizing, for both services; "
    "0: the model's limit",
    "HIPPO_MAX_IMAGE_PIXELS": "most pixels of an image after resizing, for both services; 0: the "
    "model's limit",
    "HIPPO_API_KEYS_FILE": "a TOML file of API keys with their limits (docs/api.md), readable by "
    "user 10001; without keys, any client that reaches the gateway may send requests",
    "HIPPO_MEDIA": "a folder of this machine whose files requests may name as /media/FILE",
    "HIPPO_UPLOADS": "where uploaded videos are stored: a Docker volume, or the path of a folder "
    "of this machine that user 10001 can write",
    "HIPPO_MAX_MESSAGE_MIB": "largest message between the three processes in MiB: the most media "
    "of a request that are not files under /media or uploads",
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
    "HIPPO_LOG_LEVEL": "debug, info, warning or error, for draft, target and gateway",
    "HIPPO_LOG_STYLE": "json or text",
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
