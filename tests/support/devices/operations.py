"""Counts the operations that a function launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """By name, what torch dispatches meanwhile; ``views`` launch nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counter = self.views if func.is_view else self.launched
        counter[str(func)] += 1
        return func(*args, **(kwargs or {}))
