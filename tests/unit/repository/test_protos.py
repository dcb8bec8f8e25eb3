"""Services of this tree and of the last release understand each other; the committed stubs are
those of the committed protos, and the protos are documented."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hippo.types import PROTOCOL_VERSION
from tests.support.running.protocol import facts, released, spoken

ROOT = Path(__file__).resolve().parents[3]
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
