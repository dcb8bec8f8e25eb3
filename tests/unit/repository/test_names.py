"""Class names: each means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def class_names() -> list[str]:
    """Returns the names of all top-level classes, without generated modules."""
    modules = [
        path
        for folder in ("hippo", "gateway", "services", "bench", "demo")
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    ]
    return [
        node.name
        for path in modules
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]


def test_no_two_classes_share_a_name() -> None:
    assert [name for name, count in Counter(class_names()).items() if count > 1] == []


def test_few_classes_are_called_steps() -> None:
    assert len([name for name in class_names() if "Step" in name]) <= 4
