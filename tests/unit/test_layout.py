"""The rules that keep the parts apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _imports(folder: str) -> Iterator[tuple[Path, str]]:
    for path in (ROOT / folder).rglob("*.py"):
        if "v1" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield path, node.module


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("hippo", ("services", "gateway", "demo", "bench")),
        ("services/draft", ("services.target", "gateway", "demo", "bench")),
        ("services/target", ("services.draft", "gateway", "demo", "bench")),
        ("gateway", ("services", "demo", "bench", "torch", "transformers", "av")),
    ],
)
def test_the_parts_import_only_what_they_may(folder: str, forbidden: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, name in _imports(folder)
        if any(name == root or name.startswith(root + ".") for root in forbidden)
    ]
    assert wrong == []


def test_the_speculation_cores_import_only_the_standard_library_and_types() -> None:
    allowed = ("hippo.types", "hippo.errors", "hippo.speculation")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, name in _imports("hippo/speculation")
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(allowed)
    ]
    assert wrong == []


def test_the_gateway_the_command_line_and_settings_need_no_torch() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'av', 'numpy', 'torchvision'):\n"
        "    sys.modules[name] = None\n"
        "import gateway.app, gateway.__main__, hippo.cli\n"
        "import services.draft.__main__, services.target.__main__\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
