"""The loop of every training stage, with exact saving and resuming."""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

Figures = Mapping[str, float]


class Stateful(Protocol):
    """A part whose state a stage saves: a module or an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def run_steps(
    name: str,
    folder: Path,
    *,
    num_steps: int,
    parts: Mapping[str, Stateful],
    step: Callable[[int], Figures],
    save_every: int = 100,
) -> None:
    """Run `step(0)` .. `step(num_steps - 1)`, resuming after the last saved step; changes `parts`.

    A step's data depends only on its index, so a resumed stage gives the same result.
    Writes `NAME.pt` (the state) and, at the end, `NAME.done`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, done = (folder / f"{name}.{end}" for end in ("pt", "done"))
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        first = state["step"]
        for key, part in parts.items():
            part.load_state_dict(state[key])
    if done.exists():
        return
    means: dict[str, float] = {}
    with tqdm(total=num_steps, initial=first, desc=name, unit="step", mininterval=5.0) as bar:
        for index in range(first, num_steps):
            seed_everything(index)
            figures = step(index)
            for key, value in figures.items():
                means[key] = value if key not in means else 0.9 * means[key] + 0.1 * value
            bar.update()
            bar.set_postfix({key: f"{value:.3f}" for key, value in means.items()}, refresh=False)
            if (index + 1) % save_every == 0 or index + 1 == num_steps:
                save_state(
                    checkpoint,
                    {"step": index + 1, **{key: part.state_dict() for key, part in parts.items()}},
                )
    done.write_text(f"{num_steps} steps\n")


def seed_everything(index: int) -> None:
    """Seed the global generators, so that a step depends only on its index."""
    torch.manual_seed(index)
    random.seed(index)
    np.random.seed(index % 2**32)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state atomically."""
    scratch = path.with_suffix(".tmp")
    torch.save(dict(state), scratch)
    os.replace(scratch, path)


class _Batches(torch.utils.data.Dataset[Any]):
    def __init__(self, make: Callable[[int], Any], first: int, num_steps: int) -> None:
        self.make, self.first, self.num_steps = make, first, num_steps

    def __len__(self) -> int:
        return self.num_steps - self.first

    def __getitem__(self, index: int) -> Any:
        return self.make(self.first + index)


def prefetched(
    make: Callable[[int], Any], first: int, num_steps: int, core: int | None
) -> Iterator[Any]:
    """Yields `make(first)` to `make(num_steps - 1)`, computed ahead in another process.

    The process is pinned to `core` if it is given.
    """

    def pin(_: int) -> None:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(0, {core})

    loader = torch.utils.data.DataLoader(
        _Batches(make, first, num_steps),
        batch_size=None,
        num_workers=1,
        prefetch_factor=6,
        worker_init_fn=pin,
    )
    return iter(loader)
