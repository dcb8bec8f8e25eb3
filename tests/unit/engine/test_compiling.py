"""Code that is made while a model serves is used only if it may be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hippo.engine import compiling
from hippo.models.compiled import CHECKED_ROWS, CompiledSteps


class Steps:
    """In place of compiled steps: notes what is done with them."""

    def __init__(self, differences: dict[int, float]) -> None:
        self.folder = Path("kept")
        self.checked: list[int] = []
        self.used: list[object] = []
        self._differences = differences

    def difference(self, _run_layer: object, num_rows: int) -> float:
        self.checked.append(num_rows)
        return self._differences.get(num_rows, 0.0)

    def are_small(self, differences: list[float]) -> bool:
        return max(differences) < 0.5

    def use(self, run_layer: object) -> None:
        self.used.append(run_layer)


async def _on_device(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize("differences", [{}, {7: 0.9}])
async def test_code_is_checked_for_each_number_of_rows_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, differences: dict[int, float]
) -> None:
    async def made(_steps: object) -> None:
        pass

    monkeypatch.setattr(compiling, "_compile_apart", made)
    monkeypatch.setattr(compiling, "_load", lambda _steps: "the code")
    steps = Steps(differences)
    await compiling.compile_beside(cast(CompiledSteps, steps), _on_device)
    assert steps.checked == list(CHECKED_ROWS)
    assert steps.used == ([] if differences else ["the code"])


@pytest.mark.parametrize("failing", ["_compile_apart", "_load"])
async def test_what_fails_is_told_and_nothing_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    async def made(_steps: object) -> None:
        pass

    def fail(_steps: object) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(compiling, "_compile_apart", made)
    monkeypatch.setattr(compiling, failing, fail)
    steps = Steps({})
    with caplog.at_level(logging.INFO, logger="hippo"):
        await compiling.compile_beside(cast(CompiledSteps, steps), _on_device)
    assert "steps are not compiled: RuntimeError: it is broken" in caplog.text
    assert steps.used == steps.checked == []
