"""The wheel holds all that ``hippo demo`` needs, without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files behind
    for name in ("hippo", "gateway", "services", "demo/models", "demo/clips"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def test_the_demo_runs_from_the_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert not (installed / "demo").exists()
    assert (installed / "hippo/bundled/models/target/model.safetensors").is_file()
    page = {path.name for path in (ROOT / "hippo/page").iterdir() if path.is_file()}
    assert page == {path.name for path in (installed / "hippo/page").iterdir() if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "hippo.cli", "demo", "--repeats", "1", "--max-tokens", "12"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "crowd.mp4" in done.stdout and "decode ×" in done.stdout
    assert "Outputs are equal." in done.stdout


def test_an_image_installs_what_its_build_copies(tmp_path: Path) -> None:
    copied = set()
    for file in sorted((ROOT / "deploy/docker").glob("*.Dockerfile")):
        stage = file.read_text().partition(" AS code\n")[2].partition("\nFROM ")[0]
        lines = [line.split()[1:-1] for line in stage.splitlines() if line.startswith("COPY ")]
        copied.add(tuple(name for names in lines for name in names))
    (names,) = copied  # the same in all images
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    source, app = tmp_path / "in", tmp_path / "app"
    source.mkdir()
    for name in names:
        assert f"!{name}" in ignored, f"the build's context has no {name}"
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    install = [*pip, "--no-build-isolation", "--target", str(app), str(source)]
    subprocess.run(install, check=True, timeout=300)
    assert {"hippo", "gateway", "services"} <= {path.name for path in app.iterdir()}
    assert (app / "hippo/page/index.html").is_file() and not (app / "hippo/bundled").exists()
