"""Windows of a vision tower attended together are what each gives alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.families import windows
from hippo.models.families.windows import attend_in_windows

HEADS, HEAD_DIM, SCALING = 3, 8, 0.3
MODULE = torch.nn.Identity()  # of no interest


def rows(num_rows: int, seed: int) -> list[torch.Tensor]:
    """Query, key and value as transformers lays them out: heads of rows that stand together."""
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(num_rows, 3, HEADS, HEAD_DIM, generator=generator)
    return [x.transpose(0, 1)[None] for x in joined.permute(1, 0, 2, 3).unbind(0)]


def alone(given: list[torch.Tensor]) -> torch.Tensor:
    output = scaled_dot_product_attention(given[0], given[1], given[2], scale=SCALING)
    return output.transpose(1, 2)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 4, 6, 16]), min_size=1, max_size=12), st.integers(0, 99))
def test_windows_see_themselves_alone(sizes: list[int], seed: int) -> None:
    sizes = [*sizes, 4]
    bounds = [0, *itertools.accumulate(sizes)]
    query, key, value = rows(bounds[-1], seed)
    boundaries = torch.tensor(bounds, dtype=torch.int32)
    for _ in range(2):  # layers
        found, _ = attend_in_windows(
            MODULE, query, key, value, None, scaling=SCALING, cu_seq_lens_q=boundaries
        )
        parts = [
            alone([x[:, :, first:last] for x in (query, key, value)])
            for first, last in itertools.pairwise(bounds)
        ]
        torch.testing.assert_close(found, torch.cat(parts, 1))


def test_without_windows_all_rows_see_each_other() -> None:
    query, key, value = rows(9, 0)
    found, _ = attend_in_windows(MODULE, query, key, value, None, scaling=SCALING)
    torch.testing.assert_close(found, alone([query, key, value]))


def test_layers_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    num_planned = 0
    plan = windows._plan

    def counted(boundaries: torch.Tensor, device: torch.device) -> windows.Plan:
        nonlocal num_planned
        num_planned += 1
        return plan(boundaries, device)

    monkeypatch.setattr(windows, "_plan", counted)
    query, key, value = rows(10, 0)
    for boundaries in (torch.tensor([0, 4, 8, 10]), torch.tensor([0, 5, 10])):
        for _ in range(3):
            attend_in_windows(
                MODULE, query, key, value, None, scaling=SCALING, cu_seq_lens_q=boundaries
            )
    assert num_planned == 2
