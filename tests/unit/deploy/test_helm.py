"""The Helm chart, rendered by Helm's own library and held to the schemas of Kubernetes' API."""

import functools
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from gateway.common.config import GatewaySettings
from hippo.base.config import load_settings
from hippo.metrics import GATEWAY_METRICS
from services.draft.config import DraftSettings
from services.target.config import TargetSettings
from tests.support.watching.compose import ROOT

CHART = ROOT / "deploy" / "helm" / "hippo"
KUBERNETES = ("1.30", "1.34")
OF_ITS_OWN = "monitoring.coreos.com/v1"  # not of Kubernetes' API
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "many": {
        "pairs": 4,
        "gateways": 3,
        "target": {
            "gpus": 2,
            "settings": {"MAX_QUEUE": 8, "DETERMINISTIC": False, "MAX_CONTEXT_LENGTH": 8960},
        },
        "gateway": {"settings": {"POLICY": "serial", "MAX_UPLOAD_BYTES": 1 << 40}},
        "slots": 4,
        "maxContextLength": 32768,
        "drainSeconds": 300,
        "mediaClaim": "videos",
        "hfTokenSecret": "hub",
        "apiKeysSecret": "keys",
        "otlpEndpoint": "http://tempo:4318",
        "env": [
            {"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_traceidratio"},
            {
                "name": "OTEL_EXPORTER_OTLP_HEADERS",
                "valueFrom": {"secretKeyRef": {"name": "collector", "key": "headers"}},
            },
        ],
        "models": {"storageClass": "fast", "offline": True},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "image": {"pullSecrets": [{"name": "registry"}]},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "cpu": {"target": {"gpus": 0}, "draft": {"gpus": 0}, "networkPolicy": {"enabled": False}},
}

Objects = dict[tuple[str, str], Any]


@functools.cache
def rendered(values: str) -> Objects:
    """The objects of a set of values, by kind and name."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(VALUES[values], name="hippo", namespace="video")
    objects = [
        item
        for name, text in files.items()
        if not name.endswith(".txt")
        for item in yaml.safe_load_all(text)
        if item
    ]
    found = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert len(found) == len(objects)
    return found


def containers(objects: Objects) -> dict[str, dict[str, Any]]:
    pods = (
        objects["StatefulSet", "hippo-pairs"]["spec"]["template"]["spec"],
        objects["Deployment", "hippo-gateway"]["spec"]["template"]["spec"],
    )
    return {each["name"]: each for pod in pods for each in pod["containers"]}


def environment(container: dict[str, Any]) -> dict[str, str]:
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_nothing_wrong(values: str) -> None:
    found = helm_python.lint(str(CHART), VALUES[values], strict=True)
    messages = [each for each in found["messages"] if "icon is recommended" not in str(each)]
    assert messages == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"gatways": 3},
        {"target": {"gpus": "two"}},
        {"draft": {"settings": {"slots": 4}}},  # in lower case
        {"draft": {"gpus": 2}},  # which a draft would not use
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with helm_python.Chart.load(str(CHART)) as chart, pytest.raises(helm_python.HelmError):
        chart.render(wrong, name="hippo", namespace="video")


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_every_object_is_one_of_kubernetes_api(values: str, version: str) -> None:
    for item in rendered(values).values():
        if item["apiVersion"] != OF_ITS_OWN:
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("values", VALUES)
def test_the_processes_take_the_settings_that_they_are_given(values: str) -> None:
    settings: dict[str, tuple[type[Any], str]] = {
        "target": (TargetSettings, "HIPPO_TARGET"),
        "draft": (DraftSettings, "HIPPO_DRAFT"),
        "gateway": (GatewaySettings, "HIPPO_GATEWAY"),
    }
    found = containers(rendered(values))
    assert set(found) == set(settings)
    for name, container in found.items():
        kind, prefix = settings[name]
        given = environment(container)
        fields = {f"{prefix}_{field}".upper() for field in kind.__dataclass_fields__}
        assert {each for each in given if each.startswith("HIPPO_")} <= fields
        # Directories of the container are not here.
        here = {
            key: value
            for key, value in given.items()
            if not key.endswith(("_DIR", "_MEDIA_PATH", "_KEYS_FILE"))
        }
        load_settings(kind, [], here, env_prefix=prefix, prog=name, description="")


def test_settings_override_the_chart_and_all_containers_get_the_same_further_variables() -> None:
    found = containers(rendered("many"))
    target, draft = environment(found["target"]), environment(found["draft"])
    assert target["HIPPO_TARGET_MAX_CONTEXT_LENGTH"] == "8960"
    assert draft["HIPPO_DRAFT_MAX_CONTEXT_LENGTH"] == "32768"
    assert environment(found["gateway"])["HIPPO_GATEWAY_MAX_UPLOAD_BYTES"] == str(1 << 40)
    for container in found.values():
        assert container["env"][-2:] == VALUES["many"]["env"]


def test_gateways_find_the_pairs_by_the_name_of_their_service() -> None:
    objects = rendered("many")
    given = environment(containers(objects)["gateway"])
    service = objects["Service", "hippo-pairs"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert service["spec"]["clusterIP"] == "None"
    # A pod whose draft has crashed is not ready, and its target still serves.
    assert service["spec"]["publishNotReadyAddresses"]
    assert given["HIPPO_GATEWAY_TARGET"] == f"dns+hippo-pairs:{ports['target']}"
    assert given["HIPPO_GATEWAY_DRAFT"] == f"dns+hippo-pairs:{ports['draft']}"
    for name in ("target", "draft"):
        container = containers(objects)[name]
        listening = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert listening == {each: ports[each] for each in (name, f"{name}-metrics")}
    labels = objects["StatefulSet", "hippo-pairs"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("values", VALUES)
def test_a_pod_is_given_longer_to_stop_than_its_processes_take(values: str) -> None:
    objects = rendered(values)
    found = containers(objects)
    pairs = objects["StatefulSet", "hippo-pairs"]["spec"]["template"]["spec"]
    gateways = objects["Deployment", "hippo-gateway"]["spec"]["template"]["spec"]
    for name in ("target", "draft"):
        drain = float(environment(found[name])[f"HIPPO_{name.upper()}_DRAIN_SECONDS"])
        assert pairs["terminationGracePeriodSeconds"] > drain
    grace = float(environment(found["gateway"])["HIPPO_GATEWAY_SHUTDOWN_GRACE_S"])
    _, wait = found["gateway"]["lifecycle"]["preStop"]["exec"]["command"]
    assert gateways["terminationGracePeriodSeconds"] > grace + float(wait) + 3
    # A rollout of gateways waits for the loading of a target.
    probe = found["target"]["startupProbe"]
    deadline = objects["Deployment", "hippo-gateway"]["spec"]["progressDeadlineSeconds"]
    assert deadline > probe["periodSeconds"] * probe["failureThreshold"]


def test_each_model_has_gpus_of_its_own() -> None:
    found = containers(rendered("many"))
    gpus = {name: found[name]["resources"]["limits"].get("nvidia.com/gpu") for name in found}
    assert gpus == {"target": 2, "draft": 1, "gateway": None}
    assert environment(found["target"])["HIPPO_TARGET_TENSOR_PARALLEL"] == "2"
    on_cpu = containers(rendered("cpu"))
    assert all("nvidia.com/gpu" not in each["resources"]["limits"] for each in on_cpu.values())
    assert environment(on_cpu["target"])["HIPPO_TARGET_DEVICE"] == "cpu"


def test_monitors_scrape_under_the_names_that_the_alerts_expect() -> None:
    jobs, ports = set(), set()
    of_operator = {"namespace", "service", "pod", "container", "endpoint", "node"}
    clashing = of_operator & {name for each in GATEWAY_METRICS for name in each.label_names}
    for (kind, _), item in rendered("many").items():
        if kind == "ServiceMonitor":
            selected = item["spec"]["selector"]["matchLabels"].items()
            [service] = [
                each
                for (of, _), each in rendered("many").items()
                if of == "Service" and selected <= each["metadata"]["labels"].items()
            ]
            for endpoint in item["spec"]["endpoints"]:
                jobs |= {rule["replacement"] for rule in endpoint["relabelings"]}
                assert endpoint["honorLabels"] or not clashing
                ports.add(endpoint["port"])
                assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert jobs == {"hippo-gateway", "hippo-draft", "hippo-target"}
    assert ports == {"http", "draft-metrics", "target-metrics"}
    assert not any(kind == "ServiceMonitor" for kind, _ in rendered("default"))
