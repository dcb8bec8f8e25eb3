"""The stack in containers, with the bundled pair on the CPU: built, brought up, asked.

All of it by Compose v2 and by docker-compose 1.29, each with its own builder. Skipped, with the
reason, where one is not installed, no Docker engine answers or the base image cannot be had. The
images are built on HIPPO_BASE_IMAGE (default: Docker Hub's Python); without an image of
Prometheus or Grafana (HIPPO_PROMETHEUS_IMAGE, HIPPO_GRAFANA_IMAGE) the stack is brought up
without it.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.e2e.support import ask, data_url, free_port, readiness
from tests.support.watching.compose import (
    COMPOSES,
    ROOT,
    STACKS,
    clean_environment,
    composes,
    default_of,
)

# Where these are set, something else takes the place of what cannot be had.
_STAND_INS = (
    "HIPPO_BASE_IMAGE", "HIPPO_PROMETHEUS_IMAGE", "HIPPO_GRAFANA_IMAGE", "HIPPO_TORCH_INDEX",
    "HIPPO_BUILD_NETWORK",
)  # fmt: skip
# Pip, by its version.
_NO_TORCH = "The user requested torch|No matching distribution found for torch"
pytestmark = pytest.mark.timeout(600, func_only=True)  # builds have limits of their own


@dataclasses.dataclass(frozen=True, slots=True)
class Containers:
    """A stack in containers, with the bundled pair on the CPU."""

    command: list[str]
    project: str
    files: tuple[str, ...]
    environment: dict[str, str]
    services: tuple[str, ...]

    def compose(self, *arguments: str, timeout: float = 600) -> str:
        """Runs `docker compose` or docker-compose; its output."""
        chosen = [argument for file in self.files for argument in ("-f", file)]
        done = subprocess.run(
            [*self.command, "--env-file", ".env.example", "-p", self.project, *chosen, *arguments],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def python(self, service: str, program: str) -> str:
        """What a Python program prints inside a service's container."""
        return self.compose("exec", "-T", service, "python", "-c", program).strip()

    def remains(self) -> list[str]:
        """Containers, volumes and networks of the stack, running or not."""
        label = ["--quiet", "--filter", f"label=com.docker.compose.project={self.project}"]
        lists = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [
            line
            for command in lists
            for line in subprocess.check_output(["docker", *command, *label], text=True).split()
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['HIPPO_PORT']}"


def _image(variable: str) -> str:
    """What an image's variable is set to, or its default."""
    return os.environ.get(variable) or default_of(variable)


def _can_have(image: str) -> bool:
    """Whether an image is there, or can be pulled."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        for command in (["image", "inspect"], ["pull"]):
            done = subprocess.run(["docker", *command, image], capture_output=True, timeout=600)
            if done.returncode == 0:
                return True
    return False


@pytest.fixture(scope="module", params=COMPOSES)
def containers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Containers]:
    if request.param not in composes():
        pytest.skip(f"{request.param} is not installed")
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True).returncode != 0
    ):
        pytest.skip("no Docker engine answers")
    base = _image("HIPPO_BASE_IMAGE")
    if not _can_have(base):
        pytest.skip(f"the base image {base} cannot be had")
    others = (x for x in ("prometheus", "grafana") if _can_have(_image(f"HIPPO_{x.upper()}_IMAGE")))
    services = ["draft", "target", "gateway", *others]
    cores = sorted(os.sched_getaffinity(0))
    folder = tmp_path_factory.mktemp("compose")
    environment = {
        **clean_environment(),
        **{k: v for k, v in os.environ.items() if k in _STAND_INS},
        "HIPPO_ENGINE_IMAGE": "hippo-engine:test",
        "HIPPO_GATEWAY_IMAGE": "hippo-gateway:test",
        "HIPPO_PORT": str(free_port()),
        "HIPPO_PROMETHEUS_PORT": str(free_port()),
        "HIPPO_GRAFANA_PORT": str(free_port()),
        "HIPPO_DRAFT_CPUSET": str(cores[0]),
        "HIPPO_TARGET_CPUSET": str(cores[-1]),
        "HIPPO_HF_TOKEN_FILE": str(folder / "token"),
    }
    network = {"build": {"network": os.environ.get("HIPPO_BUILD_NETWORK", "default")}}
    (folder / "token").write_text("hf_of_the_test\n")
    override = folder / "build.yml"
    override.write_text(yaml.safe_dump({"services": dict.fromkeys(services[:3], network)}))
    stack = Containers(
        command=COMPOSES[request.param],
        project=f"hippo-test-{uuid.uuid4().hex[:8]}",
        files=(*STACKS["cpu"], "deploy/compose/dashboard.yml", str(override)),
        environment=environment,
        services=tuple(services),
    )
    try:
        for name in services[:3]:
            stack.compose("build", name, timeout=3000)
        stack.compose("up", "-d", "--no-build", *services, timeout=900)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "20")
    assert stack.remains() == []


def test_the_stack_answers_a_video_question_through_the_published_port(
    containers: Containers,
) -> None:
    while (readiness(containers.url) or {}).get("draft") != "ready":
        time.sleep(0.5)  # the test's timeout ends it
    clip = ROOT / "demo" / "clips" / "tray.mp4"
    with openai.OpenAI(base_url=f"{containers.url}/v1", api_key="none", timeout=300) as client:
        answers = [ask(client, url, max_tokens=64) for url in (data_url(clip), "/media/tray.mp4")]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] and texts[0] == texts[1]
    assert all(answer.model_extra["hippo"]["draft_problem"] is None for answer in answers)


def test_every_container_becomes_healthy(containers: Containers) -> None:
    ids = containers.compose("ps", "-q").split()
    assert len(ids) == len(containers.services)
    health = ["docker", "inspect", "--format", "{{.State.Health.Status}}", *ids]
    while "starting" in (found := subprocess.check_output(health, text=True).split()):
        time.sleep(1)
    assert set(found) == {"healthy"}


def test_containers_run_without_root_and_the_gateway_without_torch(containers: Containers) -> None:
    for name in ("draft", "target", "gateway"):
        assert containers.python(name, "import os; print(os.getuid())") == "10001"
    find = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    assert containers.python("gateway", find) == "False"
    assert containers.python("target", find) == "True"
    write = "open('/app/x', 'w')"
    with pytest.raises(AssertionError, match=r"Read-only file system|Permission denied"):
        containers.python("target", write)


def test_a_build_fails_rather_than_take_a_torch_of_another_index(containers: Containers) -> None:
    nowhere = f"TORCH_INDEX=http://127.0.0.1:{free_port()}/"
    with pytest.raises(AssertionError, match=_NO_TORCH):
        containers.compose("build", "--force-rm", "--build-arg", nowhere, "target")


def test_the_token_for_gated_models_is_read_from_its_file_alone(containers: Containers) -> None:
    program = (
        "import os, huggingface_hub as hub\n"
        "print(hub.get_token(), any('hf_of_the_test' in value for value in os.environ.values()))"
    )
    for name in ("draft", "target"):
        assert containers.python(name, program) == "hf_of_the_test False"


def test_a_service_starts_offline_from_a_cache_of_the_hub(
    containers: Containers, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789abcdef")
    bundled = ROOT / "demo" / "models" / "draft"
    shutil.copytree(bundled, repository / "snapshots" / "0123456789abcdef")
    tmp_path.chmod(0o755)  # to be read by the container's user
    options = ["--detach", "--network", "none", "--read-only", "--tmpfs", "/tmp"]
    options += ["--volume", f"{tmp_path}:/models:ro"]
    options += ["--env", "HF_HUB_OFFLINE=1", "--env", "HIPPO_DRAFT_MODEL=acme/tiny"]
    command = ["docker", "run", *options, "hippo-engine:test", "services.draft"]
    started = subprocess.check_output(command, text=True).strip()
    try:
        log = ""
        while "serving acme/tiny" not in log:
            time.sleep(0.5)
            done = subprocess.run(["docker", "logs", started], capture_output=True, text=True)
            log = done.stdout + done.stderr
            assert "error" not in log, log
    finally:
        subprocess.run(["docker", "rm", "--force", started], capture_output=True, check=True)


def test_prometheus_in_the_stack_scrapes_all_three(containers: Containers) -> None:
    if "prometheus" not in containers.services:
        pytest.skip("no image of Prometheus can be had")
    port = containers.environment["HIPPO_PROMETHEUS_PORT"]
    url = f"http://127.0.0.1:{port}/api/v1/query"
    jobs = {"hippo-gateway", "hippo-draft", "hippo-target"}
    up: set[str] = set()
    while up != jobs:
        time.sleep(1)
        result = httpx.get(url, params={"query": "up == 1"}, trust_env=False).json()
        up = {row["metric"]["job"] for row in result["data"]["result"]} & jobs
