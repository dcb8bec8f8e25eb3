"""What the wheel holds, and ``hippo up`` from it as a user starts it, in an empty folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.support import CHAT, chat_body, free_port, plain_client, wait_until

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = {"hippo": "hippo", "gateway": "gateway", "services": "services"} | {
    f"demo/{name}": f"hippo/bundled/{name}" for name in ("models", "clips")
}
NOT_INSTALLED = {"undistilled"}  # of demo/models: what bench needs


def _files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, which packs this folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files behind
    for name in INSTALLED:
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder / "site")]
    subprocess.run(build, cwd=source, check=True, timeout=100)
    return folder / "site"


def test_the_wheel_holds_every_file(site: Path) -> None:
    for source, installed in INSTALLED.items():
        missing = _files(ROOT / source) - _files(site / installed)
        assert not {path for path in missing if path.parts[0] not in NOT_INSTALLED}
    assert not (site / "demo").exists()
    for role in ("target", "draft"):
        assert (site / "hippo/bundled/models" / role / "model.safetensors").stat().st_size > 1 << 20


@contextmanager
def _up(site: Path, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """It runs in ``folder`` with its log there."""
    command = [sys.executable, "-m", "hippo.cli", "up", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def _children(pid: int) -> list[int]:
    """Those that it has; none after its end."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def test_up_shows_the_last_lines_of_a_process_that_ends_and_leaves_nothing(
    site: Path, tmp_path: Path
) -> None:
    with _up(site, tmp_path, "--port", "0", "--draft-arg=--slots=0") as process:
        wait_until(lambda: len(_children(process.pid)) >= 2 or process.poll() is not None)
        children = _children(process.pid)
        assert children, (tmp_path / "log").read_text()
        process.wait(60)
        _until_dead(children)
    assert process.returncode == 1
    log = (tmp_path / "log").read_text()
    assert "the draft process ended" in log and "its last lines:\n    error: --slots is 0" in log
    assert "the draft's flags as --draft-arg=--FLAG=VALUE" in log


def test_up_serves_also_while_its_draft_is_dead_and_leaves_nothing(
    site: Path, tmp_path: Path
) -> None:
    log, port = tmp_path / "log", free_port()
    with _up(site, tmp_path, "--port", str(port)) as process:
        wait_until(lambda: b"ready at" in log.read_bytes() or process.poll() is not None)
        children = _children(process.pid)
        assert len(children) == 3, log.read_text()
        draft = next(
            child for child in children if "services.draft" in psutil.Process(child).cmdline()
        )
        psutil.Process(draft).kill()
        wait_until(lambda: b"the draft process ended (signal 9)" in log.read_bytes())
        with plain_client(f"http://127.0.0.1:{port}") as client:
            body = chat_body(None, 4, speculative={"policy": "optimistic"})
            answer = client.post(CHAT, json=body).json()
            assert client.get("/v1/samples").json()["data"]
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["hippo"]["draft_used"] is False
        # That a draft which is back is used: test_stress.py.
        wait_until(lambda: b"the draft is started again" in log.read_bytes())
        wait_until(lambda: len(_children(process.pid)) == 3)
        children = _children(process.pid)
        assert draft not in children, log.read_text()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        _until_dead(children)
    assert process.returncode == 0
    assert b"stopped" in log.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_that_still_loads_leaves_nothing(
    site: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with _up(site, tmp_path, "--port", "0") as process:
        wait_until(lambda: len(_children(process.pid)) == 2 or process.poll() is not None)
        children = _children(process.pid)
        assert children, (tmp_path / "log").read_text()
        process.send_signal(number)
        process.wait(60)
        _until_dead(children)


def test_an_image_installs_what_its_build_copies(tmp_path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = set()
    for file in sorted((ROOT / "deploy/docker").glob("*.Dockerfile")):
        before, _, stage = file.read_text().partition(" AS code\n")
        stage, _, after = stage.partition("\nFROM ")
        own, others = (
            re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
            for text in (stage, before + after)
        )
        for name in " ".join(own + others).split():
            assert f"!{name}" in ignored and (ROOT / name).exists(), f"the context has no {name}"
        copied.add(" ".join(own))
    (names,) = copied  # the same in all images
    assert "*" in ignored  # no secret is in the build's context
    source, app = tmp_path / "in", tmp_path / "app"
    source.mkdir()
    for name in names.split():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    install = [*pip, "--no-build-isolation", "--target", str(app), str(source)]
    subprocess.run(install, check=True, timeout=300)
    assert {"hippo", "gateway", "services"} <= {path.name for path in app.iterdir()}
    assert (app / "hippo/page/index.html").is_file() and not (app / "hippo/bundled").exists()


def _until_dead(children: list[int]) -> None:
    def is_alive(pid: int) -> bool:
        with suppress(OSError):
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        return False

    wait_until(lambda: not any(map(is_alive, children)))
