"""Makes torchvision importable if its compiled operators do not fit the installed torch."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

# torchvision registers autograd and shape rules for these operators at import time, so its import
# fails without them. transformers needs only torchvision's resizing, which is written in torch.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def ensure_torchvision() -> None:
    """Imports torchvision, after defining the operators that its import needs if they do not load.

    Call this before transformers' processors are imported. Does nothing if torchvision is absent or
    imported already. An import that fails for another reason raises its own error.
    """
    if "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0])
    extensions = (path for end in ("so", "pyd", "dylib") for path in folder.glob(f"_C*.{end}"))
    if any(_loads(path) for path in extensions):
        importlib.import_module("torchvision")
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    torchvision = importlib.import_module("torchvision")
    torchvision.hippo_schemas = library  # type: ignore[attr-defined]  # keeps the definitions alive


def _loads(path: Path) -> bool:
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False
    return True
