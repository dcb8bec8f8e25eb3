"""Every dtype is served on processors that lack what makes it fast."""

import itertools
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import DTYPE_NAMES, LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.placement import DTYPES, dtype_of
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.pairs import load
from tests.support.models.processors import PROCESSORS, has_fbgemm, running_on
from tests.support.models.reference import answer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "exact_rows"),
    [("target_checkpoint", None), ("llava_checkpoint", 4), ("experts_checkpoint", None)],
)
def test_every_dtype_is_near_float32(
    request: pytest.FixtureRequest, family: str, exact_rows: int | None
) -> None:
    folder: Path = request.getfixturevalue(family)
    expected = answer(load(folder))
    limits = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.005}
    for processor, dtype in itertools.product(PROCESSORS, DTYPE_NAMES):
        with running_on(processor):
            model = load(folder, dtype=dtype, exact_rows=exact_rows)
            assert model.info.dtype == dtype
            difference = (answer(model) - expected).norm() / expected.norm()
        assert difference < limits[dtype], (processor, dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_plain_weights_do_not_keep_the_weight_file_in_memory(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "model",
        num_heads=16,
        head_dim=64,
        intermediate_size=4096,
        dtype=torch.bfloat16,
    )
    with running_on("unknown"):
        model = load_model(LoadPlan(str(folder), dtype="bfloat16", max_context_length=64))
    maps: Any = psutil.Process().memory_maps(grouped=False)
    resident = sum(each.rss for each in maps if each.path.startswith(str(folder)))
    size = (folder / "model.safetensors").stat().st_size
    assert model.info.dtype == "bfloat16" and resident < size / 8


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("own", DTYPE_NAMES)
def test_auto_is_what_the_processor_multiplies_fast(processor: str, own: str) -> None:
    checkpoint = Checkpoint("tiny", Path("tiny"), {"dtype": own}, 0, 0)
    half = "float16" if has_fbgemm(processor) else "float32"
    for is_draft, expected in ((True, half), (False, half if own == "float16" else "float32")):
        plan = LoadPlan("tiny", auto_is_half=is_draft)
        with running_on(processor):
            assert dtype_of(plan, checkpoint, CPU) == DTYPES[expected]


def test_auto_is_bfloat16_for_a_draft_where_that_alone_is_fast(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_on("ARM"):
        monkeypatch.setattr(
            "hippo.models.loading.placement.packs_weights", lambda _, dtype: dtype == torch.bfloat16
        )
        plan = LoadPlan(str(target_checkpoint), max_context_length=64, auto_is_half=True)
        assert load_model(plan).info.dtype == "bfloat16"
