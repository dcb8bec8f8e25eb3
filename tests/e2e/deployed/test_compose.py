"""The files of the stack, and what Compose makes of them.

What needs `docker compose` or docker-compose is run with both, and skipped, with the reason, where
one is not installed.
"""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.common.config import GatewaySettings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings
from tests.support.watching.compose import (
    COMPOSES,
    ROOT,
    STACKS,
    StrictLoader,
    clean_environment,
    compose_files,
    composes,
)

SETTINGS = {"DRAFT": DraftSettings, "TARGET": TargetSettings, "GATEWAY": GatewaySettings}
GPUS = {
    "gpus": {"draft": ["0"], "target": ["1"]},
    "one gpu": {"draft": ["0"], "target": ["0"]},
    "prefill helper": {"draft": ["0"], "target": ["all"]},
    "tensor parallel": {"draft": ["0"], "target": ["1", "2"]},
    "cpu": {"draft": [], "target": []},
    "dashboard": {"draft": ["0"], "target": ["1"]},
}
NOT_KNOBS = {
    "port_file": "the ports are fixed",
    "lookup_period_s": "the stack has one pair, at addresses of its own",
    "cpu_core": "Docker pins, by cpuset",
    "cpu_cores": "Docker pins, by cpuset",
    "prefill_helper_core": "Docker pins, by cpuset",
    "devices": "Docker chooses them; a container sees its own alone",
    # The services are reached inside the stack's network only.
    **{
        f"{side}tls_{file}": "no TLS"
        for side in ("", "services_")
        for file in ("ca", "cert", "key")
    },
    "services_tls": "no TLS",
}


@pytest.mark.parametrize("path", compose_files(), ids=lambda path: path.name)
def test_no_key_of_a_file_is_given_twice(path: Path) -> None:
    assert yaml.load(path.read_text(encoding="utf-8"), StrictLoader)["services"]


@pytest.mark.parametrize("service", SETTINGS)
def test_every_setting_of_a_service_is_a_knob_of_the_stack_or_fixed_by_it(service: str) -> None:
    given: set[str] = set()
    for path in compose_files():
        stack = yaml.safe_load(path.read_text(encoding="utf-8"))
        given |= set(stack["services"].get(service.lower(), {}).get("environment", {}))
    settings = {
        f"HIPPO_{service}_{field.name}".upper()
        for field in dataclasses.fields(SETTINGS[service])
        if field.name not in NOT_KNOBS
    }
    assert settings == {name for name in given if name.startswith(f"HIPPO_{service}_")}


def _config(
    compose: str, chosen_files: tuple[str, ...], **changes: str
) -> subprocess.CompletedProcess[str]:
    chosen = [argument for file in chosen_files for argument in ("-f", file)]
    return subprocess.run(
        [*COMPOSES[compose], "--env-file", ".env.example", *chosen, "config"],
        cwd=ROOT, env=clean_environment(**changes), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def _services(compose: str, files: tuple[str, ...], **changes: str) -> dict[str, Any]:
    done = _config(compose, files, **changes)
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


@pytest.fixture(params=COMPOSES)
def compose(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name not in composes():
        pytest.skip(f"{name} is not installed")
    return name


def _gpus(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    return [
        gpu for device in reserved.get("devices", []) for gpu in device.get("device_ids", ["all"])
    ]


@pytest.mark.parametrize("stack", STACKS)
def test_compose_takes_the_files_of_each_stack(compose: str, stack: str) -> None:
    services = _services(compose, STACKS[stack])
    assert set(services) == {"draft", "target", "gateway", "prometheus", "grafana"}
    published = {name for name, service in services.items() if service.get("ports")}
    assert published == {"gateway"} | ({"prometheus", "grafana"} if stack == "dashboard" else set())
    gpus = {name: _gpus(services[name]) for name in ("draft", "target")}
    assert gpus == GPUS[stack]
    conditions = {k: v["condition"] for k, v in services["gateway"]["depends_on"].items()}
    assert conditions == {"draft": "service_started", "target": "service_healthy"}
    if stack == "gpus":
        assert _services(compose, ()) == services, "the files read by default"
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert service["mem_limit"], name


def test_the_cpu_stack_pins_each_model_to_cores_of_its_own(compose: str) -> None:
    services = _services(compose, STACKS["cpu"], HIPPO_TARGET_CPUSET="2-5")
    pinned = {name: service["cpuset"] for name, service in services.items()}
    assert pinned.pop("target") == "2-5"
    assert set(pinned.values()) == {"0"}


def test_spans_go_to_tempo_or_to_another_collector(compose: str) -> None:
    files = (*STACKS["gpus"], "deploy/compose/traces.yml")
    for changes, url in (
        ({}, "http://tempo:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector.example"}, "https://collector.example"),
    ):
        services = _services(compose, files, **changes)
        assert services["tempo"]["mem_limit"] and services["tempo"]["logging"]["options"]
        for name in ("draft", "target", "gateway"):
            assert services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == url


def test_a_dashboard_with_a_login_needs_a_password(compose: str) -> None:
    with_login = (*STACKS["dashboard"], "deploy/compose/login.yml")
    refused = _config(compose, with_login)
    assert refused.returncode != 0
    assert "name the file that holds the password" in refused.stderr
    assert _config(compose, with_login, HIPPO_GRAFANA_PASSWORD_FILE="x").returncode == 0
