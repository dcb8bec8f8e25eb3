"""pyproject.toml declares what the code imports; commands say which package is missing."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from hippo.base.extras import needs_extra

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
_PINNED = re.findall(r"^(\S+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
PINS: dict[str, str] = {canonicalize_name(name): version for name, version in _PINNED}
OWN = {"hippo", "services", "gateway", "bench", "demo", "tests"}
# Imported by another package, not by name here.
UNNAMED = {"opentelemetry-exporter-otlp-proto-http"}


def declared(*extras: str) -> dict[str, Requirement]:
    """The dependencies and those of the extras, with what an extra takes from others."""
    found: dict[str, Requirement] = {}
    lines = list(PROJECT["dependencies"]) if not extras else []
    for extra in extras:
        lines += EXTRAS[extra]
    for line in lines:
        wanted = Requirement(line)
        if wanted.name == PROJECT["name"]:
            found |= declared(*wanted.extras)
        else:
            found[canonicalize_name(wanted.name)] = wanted
    return found


@functools.cache
def distributions() -> dict[str, set[str]]:
    """By name of a module: what brings it."""
    return {
        module: {canonicalize_name(each) for each in brought}
        for module, brought in packages_distributions().items()
    }


@functools.cache
def imported(folder: str) -> set[tuple[Path, str]]:
    """The modules that the code of a folder imports, also by a name given to import_module."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case ast.Call(func=ast.Attribute(attr="import_module" | "find_spec")):
                    names = [
                        argument.value
                        for argument in node.args
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    ]
            for name in names:
                package = name.partition(".")[0]
                if package not in OWN | sys.stdlib_module_names | {"_typeshed"}:
                    found.add((path.relative_to(ROOT), package))
    return found


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("gateway", ()),
        ("services", ("engine",)),
        ("hippo", ("all",)),
        ("bench", ("dev",)),
        ("demo", ("dev",)),
        ("tests", ("dev",)),
        ("protos", ("dev",)),
        ("examples", ("dev",)),
    ],
)
def test_all_that_is_imported_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    known = {*declared(), *declared(*extras)}
    wrong = {
        f"{path} imports {package}"
        for path, package in imported(folder)
        if not distributions().get(package, set()) & known
    }
    assert wrong == set()


def test_all_that_the_server_declares_is_imported() -> None:
    used = {
        distribution
        for folder in ("gateway", "services", "hippo")
        for _, package in imported(folder)
        for distribution in distributions().get(package, set())
    }
    assert {*declared(), *declared("all")} - used - UNNAMED == set()


def test_the_generated_stubs_take_the_lowest_grpcio_and_protobuf() -> None:
    stubs = "".join(path.read_text() for path in (ROOT / "hippo/v1").glob("*.py"))
    (grpc,) = set(re.findall(r"^GRPC_GENERATED_VERSION = '(.+)'$", stubs, re.MULTILINE))
    (protobuf,) = set(re.findall(r"^# Protobuf Python Version: (.+)$", stubs, re.MULTILINE))
    wanted = declared() | declared("dev")
    assert str(wanted["protobuf"].specifier) == f">={protobuf}"
    for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-tools"):
        assert str(wanted[name].specifier) == f">={grpc}", name


def test_the_pins_are_within_the_bounds_and_pin_all_that_is_declared() -> None:
    wanted = declared() | declared("dev")
    assert wanted.keys() <= PINS.keys()
    outside = {
        name: str(requirement)
        for name, requirement in wanted.items()
        if not requirement.specifier.contains(PINS[name])
    }
    assert outside == {}


def test_the_lower_bounds_can_be_installed_together(tmp_path: Path) -> None:
    compiled = tmp_path / "lowest.txt"
    options = ["--resolution", "lowest-direct", "--all-extras", "--python-version", "3.11"]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "--system-certs", "pip", "compile", "-q", *options,
         "--no-header", "--no-annotate", "-o", str(compiled), str(ROOT / "pyproject.toml")],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    if done.returncode != 0 and "No solution found" not in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lowest = dict(line.split("==") for line in compiled.read_text().splitlines())
    bounds = {
        name: bound.version
        for name, wanted in (declared() | declared("dev")).items()
        for bound in wanted.specifier
        if bound.operator == ">="
    }
    higher = {
        name: f"at least {lowest[name]}, not {bound}"
        for name, bound in bounds.items()
        if Version(lowest[name]) != Version(bound)
    }
    assert higher == {}


@pytest.mark.parametrize(
    ("image", "extras"), [("engine", ("engine", "quantized", "traces")), ("gateway", ("traces",))]
)
def test_an_image_installs_pinned_files_of_what_is_declared(
    image: str, extras: tuple[str, ...]
) -> None:
    """After a change of versions `make locks` writes the files again."""
    lock = (ROOT / f"deploy/docker/{image}.lock").read_text()
    entries = re.findall(
        r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:\w{64}.*\n)+)", lock, re.MULTILINE
    )
    assert len(entries) == lock.count("==")
    locked = {canonicalize_name(name): version for name, version, _ in entries}
    assert declared(*extras).keys() - locked.keys() <= {"torch", "torchvision"}
    assert {name: PINS.get(name) for name in locked} == locked


def test_images_and_actions_of_others_are_named_by_digest() -> None:
    texts = [
        *ROOT.glob("docker-compose.yml"), *ROOT.glob("deploy/compose/*.yml"),
        *ROOT.glob("deploy/docker/*.Dockerfile"), *ROOT.glob(".github/workflows/*.yml"),
    ]  # fmt: skip
    named = [
        name
        for path in texts
        for name in re.findall(
            r"(?:_IMAGE:-|ARG BASE=|uses: )([\w./-]+[:@][\w.@:-]+)", path.read_text()
        )
    ]
    assert len(named) >= 8
    for name in named:
        if not name.startswith("hippo-"):
            assert re.search(r"@(sha256:[0-9a-f]{64}|[0-9a-f]{40})$", name), name


def test_the_workflow_runs_the_least_and_the_newest_python_that_are_declared() -> None:
    classifiers = [
        each.rpartition(" ")[2]
        for each in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", each)
    ]
    ordered = sorted(classifiers, key=Version)
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={ordered[0]}")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = {
        entry["python"]
        for job in workflow["jobs"].values()
        for entry in job["strategy"]["matrix"]["include"]
    }
    assert {ordered[0], ordered[-1]} <= tested <= set(ordered)


CLIP = str(ROOT / "demo/clips/handful.mp4")
TARGET, DRAFT = str(ROOT / "demo/models/target"), str(ROOT / "demo/models/draft")
DISTILL = ("hippo.cli", "distill", "--target", TARGET, "--draft", DRAFT, "--videos", "clips")
ENGINE = ("accelerate", "av", "huggingface_hub", "numpy", "PIL", "psutil", "torch", "transformers")


INSTALL = "needs {}: pip install 'hippo-serve"


@pytest.mark.parametrize(
    ("missing", "command", "sentence"),
    [
        (ENGINE, ("services.draft", "--model", DRAFT), f"the draft service {INSTALL}[engine]'"),
        (ENGINE, ("services.target", "--model", TARGET), f"the target service {INSTALL}[engine]'"),
        (
            ENGINE,
            ("hippo.cli", "inspect", CLIP),
            f"`hippo inspect` runs the target here and {INSTALL}[engine]'",
        ),
        (
            ENGINE,
            (*DISTILL, "--all-weights", "--out", "trained"),
            f"`hippo distill` {INSTALL}[distill]'",
        ),
        (
            ("peft",),
            (*DISTILL, "--out", "trained"),
            "adapters need {}: pip install 'hippo-serve[distill]', or give --all-weights",
        ),
        (
            ("matplotlib",),
            ("hippo.cli", "bench", "--plot", "bench.svg"),
            f"a plot {INSTALL}[plots]', or leave --plot out",
        ),
    ],
    ids=["draft", "target", "inspect", "distill", "adapters", "plots"],
)
def test_a_command_says_what_to_install(
    tmp_path: Path, missing: tuple[str, ...], command: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "clips").mkdir()
    module, *arguments = command
    program = (
        "import importlib.util, runpy, sys\n"
        f"missing = {missing!r}\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *_: None if name in missing else find(name, *_)\n"
        f"sys.argv = {[module, *arguments]!r}\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.strip() in [f"error: {sentence.format(package)}" for package in missing]


def test_a_broken_package_is_no_missing_one() -> None:
    with pytest.raises(ImportError, match="libcuda"), needs_extra("engine", "this"):
        raise ImportError("libcuda.so.1: cannot open shared object file", name="torch")


def test_an_own_module_that_is_missing_is_our_fault() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("engine", "this"):
        raise ModuleNotFoundError("No module named 'hippo.nowhere'", name="hippo.nowhere")
