"""A step's matrix products by the form of their weights: ``python -m bench.products``.

For each number of rows the products of all layers, one layer after the other, so that with enough
layers every weight has left the core's own cache when its turn comes. Forms (hippo.models.linear)
take turns, some rounds each; plain is what torch's modules do, with weights ``[out, in]``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.environment import describe_environment
from hippo.config import SettingsError, load_settings, setting
from hippo.models.linear import Form, Linear, make_in_form
from hippo.models.loading import DTYPES

_WARM_UPS = 2  # the first calls after another form's find its weights in the cache
_REPEATS = 8
_FORMS: tuple[Form, ...] = ("packed", "transposed")
_COLUMNS = ("plain", *_FORMS)


@dataclass(frozen=True, slots=True)
class ProductsSettings:
    """What is measured; as it stands, the bundled target."""

    hidden: int = setting(320, help="hidden size")
    intermediate: int = setting(768, help="that of the MLP")
    key_values: int = setting(128, help="columns of keys and values together")
    layers: int = setting(20, help="decoder layers")
    dtype: str = setting("float32", help="float32 or bfloat16")
    rows: tuple[str, ...] = setting(
        ("1", "2", "4", "8", "16", "24", "32", "64", "96", "120"), help="rows of a forward"
    )
    rounds: int = setting(5, help="turns of each form")
    threads: int = setting(1, help="CPU threads")
    output: str = setting("bench/out/products.json", help="where the figures go")

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise SettingsError(f"--dtype is {self.dtype}; it must be float32 or bfloat16")


def main(argv: list[str]) -> None:
    """Measures and prints a table."""
    settings = load_settings(
        ProductsSettings,
        argv,
        {},
        env_prefix="HIPPO_BENCH",
        prog="python -m bench.products",
        description=__doc__ or "",
    )
    torch.set_num_threads(settings.threads)
    console = Console(width=100)
    console.print("| rows | " + ", ms | ".join(_COLUMNS) + ", ms |")
    console.print("|---:|" + "---:|" * len(_COLUMNS))
    lines = []
    with torch.inference_mode():
        inputs, products = _inputs_and_products(settings)
        for num_rows in map(int, settings.rows):
            given = [x[:num_rows] for x in inputs]
            times_ms = _median_ms(given, products, settings.rounds)
            lines.append({"rows": num_rows, **dict(zip(_COLUMNS, times_ms, strict=True))})
            console.print(f"| {num_rows} | " + " | ".join(f"{ms:.2f}" for ms in times_ms) + " |")
    document = {
        "environment": describe_environment(),
        "settings": asdict(settings),
        "milliseconds": lines,
    }
    Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
    Path(settings.output).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _inputs_and_products(
    settings: ProductsSettings,
) -> tuple[list[torch.Tensor], list[list[Linear]]]:
    """An input of enough rows for every product of a step; these, column by column."""
    dtype, hidden = DTYPES[settings.dtype], settings.hidden
    shapes = (
        (hidden + settings.key_values, hidden),
        (hidden, hidden),
        (2 * settings.intermediate, hidden),
        (hidden, settings.intermediate),
    )
    most_rows = max(map(int, settings.rows))
    weights = [torch.randn(shape, dtype=dtype) for _ in range(settings.layers) for shape in shapes]
    inputs = [torch.randn(most_rows, weight.shape[1], dtype=dtype) for weight in weights]
    forms = [[make_in_form(form, weight) for weight in weights] for form in _FORMS]
    return inputs, [[_Plain(weight) for weight in weights], *forms]


class _Plain:
    prepares_rows = False

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight)


def _median_ms(
    inputs: Sequence[torch.Tensor], products: Sequence[Sequence[Linear]], num_rounds: int
) -> list[float]:
    """Of all products of a step, column by column."""
    times: list[list[float]] = [[] for _ in products]
    for _ in range(num_rounds):
        for column, taken in zip(products, times, strict=True):
            for repeat in range(_WARM_UPS + _REPEATS):
                began = time.perf_counter()
                for x, product in zip(inputs, column, strict=True):
                    product(x)
                if repeat >= _WARM_UPS:
                    taken.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    main(sys.argv[1:])
