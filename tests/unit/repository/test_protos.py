"""The committed stubs are those of the committed protos, and the protos are documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = sorted((ROOT / "protos/hippo/v1").glob("*.proto"))


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
    lines = proto.read_text(encoding="utf-8").splitlines()
    declaration = re.compile(r"^\s*(message|enum|service|rpc|oneof|[\w.]+ \w+ =|\w+ = \d)")
    bare = [
        f"{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if re.match(r"^\s*((repeated|optional) )?" + declaration.pattern.lstrip("^"), line)
        and not line.strip().startswith(("syntax", "//"))
        and not lines[number - 1].strip().startswith("//")
    ]
    assert bare == []
