"""Makes torchvision importable beside a torch build that its compiled operators do not fit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# The operators whose absence stops torchvision's import: it registers autograd and shape rules for
# them at import time. transformers needs only its resizing, which is written in torch.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def ensure_torchvision() -> None:
    """Imports torchvision, first defining the operators it misses when its own cannot be loaded.

    To be called before transformers' processors are imported; does nothing when torchvision is
    absent or already imported. An import that fails for another reason raises as it would have.
    """
    if "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0])
    if any(_loads(path) for path in _extensions(folder)):
        importlib.import_module("torchvision")
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    torchvision = importlib.import_module("torchvision")
    torchvision.hippo_schemas = library  # type: ignore[attr-defined]  # they last as long as it


def _extensions(folder: Path) -> Iterator[Path]:
    for suffix in (".so", ".pyd", ".dylib"):
        yield from folder.glob(f"_C*{suffix}")


def _loads(path: Path) -> bool:
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False
    return True
