"""What does not fit is refused before it is loaded; slots are as many as fit beside the weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import GIB, MOST_AUTO_SLOTS
from hippo.errors import ModelLoadError
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading import memory

MIB = 1 << 20
CPU = torch.device("cpu")


def needs(**changes: int) -> memory.MemoryNeeds:
    sizes: dict[str, Any] = {
        "weight_bytes": 100 * MIB,
        "slot_bytes": 10 * MIB,
        "work_bytes": 10 * MIB,
    }
    return memory.MemoryNeeds(
        name="a model",
        context_length=512,
        slot_tokens=512,
        device=CPU,
        dtype=torch.float32,
        **(sizes | changes),
    )


def plan(**changes: Any) -> LoadPlan:
    return LoadPlan("m", max_context_length=512, **changes)


def check(
    *,
    num_slots: int | None = 5,
    budget_bytes: int | None = None,
    reserved_bytes: int = 40 * MIB,
    **changes: int,
) -> None:
    memory.check_fits(
        plan(num_slots=num_slots, budget_bytes=budget_bytes),
        needs(reserved_bytes=reserved_bytes, **changes),
    )


def fitting(*, num_processes: int = 1, reserved_bytes: int = 0, **changes: Any) -> int:
    sizes = needs(num_processes=num_processes, work_bytes=15 * MIB, reserved_bytes=reserved_bytes)
    given = plan(num_slots=None, **changes)
    return memory.fitting_slots(given, sizes, memory.left_for_slots(given, sizes))


@pytest.fixture
def two_hundred_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MiB are free, and the process has taken 60."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 200 * MIB)
    monkeypatch.setattr(memory, "taken_bytes", lambda device: 60 * MIB)


@pytest.mark.usefixtures("two_hundred_mib")
class TestSums:
    def test_weights_cache_work_and_earlier_media_fill_the_device_to_the_last_byte(self) -> None:
        check()
        with pytest.raises(ModelLoadError):
            check(reserved_bytes=40 * MIB + 1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"reserved_bytes": 41 * MIB},
            {"slot_bytes": 30 * MIB},
            {"weight_bytes": 200 * MIB},
            {"slot_bytes": 151 * MIB, "num_slots": None},
        ],
    )
    def test_a_refusal_says_what_each_part_takes_and_what_helps(
        self, changes: dict[str, int]
    ) -> None:
        advice = (
            r"GiB of weights in float32, .* GiB of cache for . slots? of 512 tokens, .*: lower "
            "--slots, --max-context-length or --vision-cache-mb or --media-cache-mb, or use "
            "--dtype bfloat16, a smaller model"
        )
        with pytest.raises(ModelLoadError, match=advice):
            check(**changes)

    def test_a_budget_counts_what_the_process_has_already(self) -> None:
        check(budget_bytes=260 * MIB)
        with pytest.raises(ModelLoadError, match=r"--memory-gib leaves 0\.19 GiB"):
            check(budget_bytes=259 * MIB)

    def test_half_of_a_cpus_free_memory_is_filled_with_slots(self) -> None:
        assert fitting() == (100 - 15) // 10
        assert fitting(reserved_bytes=20 * MIB) == (100 - 15 - 20) // 10
        assert fitting(num_processes=2) == (50 - 15) // 10

    def test_a_budget_is_filled_as_a_whole_but_not_beyond_what_is_free(self) -> None:
        assert fitting(budget_bytes=160 * MIB) == (160 - 60 - 15) // 10
        assert fitting(budget_bytes=10 * GIB) == (200 - 15) // 10
        assert fitting(budget_bytes=50 * MIB) == 0

    def test_no_slot_is_an_error_that_says_what_one_takes(self) -> None:
        with pytest.raises(ModelLoadError, match=r"512 tokens takes 0\.01 GiB.*0\.20 GiB left"):
            memory.choose_slots(plan(num_slots=None), needs(), 0)

    def test_a_number_that_was_given_is_taken(self) -> None:
        assert memory.choose_slots(plan(num_slots=3), needs(), 9) == 3


def test_a_model_loaded_without_a_number_has_the_slots_that_its_memory_takes(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = find_shape(str(target_checkpoint))
    slot = shape.cache_bytes(4096, bytes_each=4)
    work = shape.work_bytes(4096, bytes_each=4, cache_each=4)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * (work + 5 * slot))
    caplog.set_level(logging.INFO)
    model = load_model(LoadPlan(str(target_checkpoint), num_slots=None, max_context_length=4096))
    assert model.info.num_slots == 5
    assert "a sequence of 4096 tokens takes" in caplog.text
    assert "5 fit beside the weights" in caplog.text


def test_more_slots_than_are_of_use_are_not_taken(
    target_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(LoadPlan(str(target_checkpoint), num_slots=None, max_context_length=256))
    assert model.info.num_slots == MOST_AUTO_SLOTS
    assert f"{MOST_AUTO_SLOTS} slots are used (--slots for more)" in caplog.text
