"""The rules that keep the parts apart; the page on the architecture names what there is; the
protocol is that of the last release, of the committed protos and of the docs."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hippo.types import PROTOCOL_VERSION
from tests.support.running.protocol import facts, released, spoken

ROOT = Path(__file__).resolve().parents[3]


Graph = dict[str, set[str]]


def _modules(*folders: str) -> dict[str, Path]:
    """Returns the hand-written modules by their dotted names; a package's name is its folder's."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
        if "v1" not in path.parts
    }


def _imports(path: Path) -> Iterator[str]:
    """Yields what a file imports, also inside functions and for types only; ``a.b`` of
    ``from a import b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _graph(*folders: str) -> Graph:
    """Returns which modules of the folders each of them imports."""
    modules = _modules(*folders)

    def known(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    return {
        name: {known(each) for each in _imports(path)} & modules.keys() - {name}
        for name, path in modules.items()
    }


def _by_folder(graph: Graph) -> Graph:
    """Returns which folders each folder imports. A ``__main__`` is a program above its folder."""
    modules = _modules(*{name.partition(".")[0] for name in graph})

    def folder(name: str) -> str:
        parent = modules[name].parent.relative_to(ROOT)
        return name if name.endswith("__main__") else ".".join(parent.parts)

    found: Graph = {}
    for name, imported in graph.items():
        found.setdefault(folder(name), set()).update(map(folder, imported))
    return {name: imported - {name} for name, imported in found.items()}


@pytest.mark.parametrize("folder", ["hippo", "gateway", "services", "bench", "demo"])
def test_neither_files_nor_folders_import_each_other_in_a_circle(folder: str) -> None:
    graph = _graph(folder)
    for each in (graph, _by_folder(graph)):
        TopologicalSorter(each).prepare()  # raises CycleError, which names the circle


SERVING = ("hippo.lab", "demo", "bench", "tests")


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("hippo", ("services", "gateway", *SERVING)),
        ("hippo/lab", ("services", "gateway", "demo", "bench", "tests")),
        ("services/draft", ("services.target", "gateway", *SERVING)),
        ("services/target", ("services.draft", "gateway", *SERVING)),
        ("gateway", ("services", *SERVING, "torch", "transformers", "av")),
    ],
)
def test_the_parts_import_only_what_they_may(folder: str, forbidden: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for own, path in _modules(folder).items()
        for name in _imports(path)
        if any(name == root or name.startswith(root + ".") for root in forbidden)
        and not (folder == "hippo" and own.startswith("hippo.lab"))
    ]
    assert wrong == []


def test_the_speculation_cores_import_only_the_standard_library_and_types() -> None:
    allowed = ("hippo.types", "hippo.errors", "hippo.speculation")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in _modules("hippo/speculation").values()
        for name in _imports(path)
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


TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("### The way of one token")[2].partition("\n## ")[0]
WAY = re.findall(r"^\| `([\w.]+)` \|", SECTION, re.MULTILINE)


@pytest.mark.parametrize("name", WAY)
def test_each_function_on_a_tokens_way_exists(name: str) -> None:
    parts = name.split(".")
    num_module = next(i for i, part in enumerate(parts) if part[0].isupper() or i == len(parts) - 1)
    module = importlib.import_module(".".join(parts[:num_module]))
    assert callable(reduce(getattr, parts[num_module:], module))


def test_a_tokens_way_is_at_most_thirty_calls() -> None:
    assert 20 < len(WAY) <= 30


PROTOS = sorted((ROOT / "protos/hippo/v1").glob("*.proto"))


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [f"{name}: {was}" for name, was in before.items() if after.get(name) != was]


def test_the_protocol_is_compatible_with_the_last_release() -> None:
    last = released()
    assert last["protocol_version"] <= PROTOCOL_VERSION
    if last["protocol_version"] == PROTOCOL_VERSION:
        found = _changed(last["facts"], facts(spoken()))
        assert found == [], "additions only, or a new PROTOCOL_VERSION"


@pytest.mark.parametrize(
    ("field", "attribute", "value", "said"),
    [
        ("epoch", "name", "run", "Commit = 1"),
        ("epoch", "number", 9, "Commit = 1"),
        ("epoch", "type", 4, "Commit = 1"),
        ("token_ids", "label", 1, "Commit = 3"),
        (None, "", 0, "MediaKind = 2"),
    ],
)
def test_a_breaking_change_is_found(
    field: str | None, attribute: str, value: Any, said: str
) -> None:
    file, *others = spoken()
    if field is None:
        del file.enum_type[0].value[-1]
    else:
        (message,) = (each for each in file.message_type if each.name == "Commit")
        (found,) = (each for each in message.field if each.name == field)
        setattr(found, attribute, value)
    (problem,) = _changed(facts(spoken()), facts([file, *others]))
    assert problem.startswith(said)


def test_the_committed_stubs_are_fresh(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "protos/generate.py", str(tmp_path)], cwd=ROOT, check=True, timeout=60
    )
    generated = {path.name: path.read_bytes() for path in (tmp_path / "hippo/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "hippo/v1").glob("*_pb2*")}
    stale = [name for name in generated | committed if generated.get(name) != committed.get(name)]
    assert stale == [], "run `make protos` and commit the result"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_every_message_field_and_rpc_is_commented(proto: Path) -> None:
    lines = [line.strip() for line in proto.read_text(encoding="utf-8").splitlines()]
    declared = r"((repeated|optional) )?(message|enum|service|rpc|oneof|[\w.]+ \w+ =|\w+ = \d)"
    bare = [
        f"{number}: {line}"
        for number, (before, line) in enumerate(pairwise(lines), 2)
        if re.match(declared, line)
        and not line.startswith(("syntax", "//"))
        and not before.startswith("//")
    ]
    assert bare == []
