"""What services do with a model, on a real GPU: the numbers are those of the CPU in float32, and
the host waits for nothing inside a step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.models.products.kernels import difference_of
from hippo.models.runners import captured
from hippo.models.runners.captured import CapturedRunner, shapes_of
from tests.support.models.model_calls import FAMILIES, compare_all
from tests.support.models.pairs import load
from tests.support.models.reference import clip, prepare, user

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONTEXT, SHORT_PREFIX = 512, 200  # both lengths of graphs are used
FORMS = [(torch.float32, "off"), (torch.bfloat16, "off"), (torch.bfloat16, "on")]


@contextmanager
def no_waits() -> Iterator[None]:
    """Raises an error where the host waits for the GPU."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "graphs"), FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpus_numbers_are_those_of_the_cpu(
    family: str,
    dtype: torch.dtype,
    graphs: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "_SHORT_PREFIX", SHORT_PREFIX)
    name, options = FAMILIES[family]
    folder: Path = request.getfixturevalue(name)
    options = {**options, "num_slots": 4, "max_context_length": CONTEXT}
    here = load(folder, **options)
    name_of = str(dtype).removeprefix("torch.")
    there = load(folder, device="cuda", dtype=name_of, cuda_graphs=graphs, **options)
    if graphs == "on":
        graphs_made = list(there.capture_steps())
        assert isinstance(there._fixed, CapturedRunner) and there._fixed._capture is not None
        assert len(graphs_made) == (1 if "exact_rows" in options else len(shapes_of(4, CONTEXT)))
    # torch's product of experts in float32 reads on the host how many rows each expert has.
    may_wait = dtype == torch.float32 and "experts" in family

    def agree(run: Callable[[Model], torch.Tensor]) -> torch.Tensor:
        """Runs it on both; the GPU's run must not wait. Gives the CPU's."""
        expected = run(here)
        run(there)  # kernels are loaded at their first call, which waits
        with nullcontext() if may_wait else no_waits():
            found = run(there)
        assert found.device.type == "cuda"
        difference = difference_of(found.cpu(), expected, dtype)
        assert difference is None, f"{run}: {difference}"
        return expected

    assert there.info.device == "cuda:0"
    on_gpu = there.embed_visual(prepare(here, user(0, "what is it?"), clip()))
    assert on_gpu is not None and on_gpu.device.type == "cuda"
    compare_all(here, there, agree, selects_alike=dtype == torch.float32)
