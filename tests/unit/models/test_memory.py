"""What does not fit is refused before it is loaded, with what to lower."""

from __future__ import annotations

import pytest
import torch

from hippo.errors import ModelLoadError
from hippo.models import memory

MIB = 1 << 20


def check(**changes: int) -> None:
    values = {"weight_bytes": 100 * MIB, "cache_bytes": 50 * MIB, "reserved_bytes": 40 * MIB}
    values |= changes
    memory.check_fits(
        "a model",
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_slots=4,
        max_context_length=512,
        **values,
    )


@pytest.fixture(autouse=True)
def _two_hundred_mib_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 200 * MIB)


def test_weights_cache_room_to_work_and_earlier_media_fill_the_device_to_the_last_byte() -> None:
    check()
    with pytest.raises(ModelLoadError):
        check(reserved_bytes=40 * MIB + 1)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"reserved_bytes": 41 * MIB}, "lower --vision-cache-mb"),
        ({"cache_bytes": 150 * MIB}, "lower --slots or --max-context-length"),
        ({"weight_bytes": 200 * MIB}, "use --dtype bfloat16"),
    ],
)
def test_the_advice_is_about_what_takes_too_much(changes: dict[str, int], advice: str) -> None:
    with pytest.raises(ModelLoadError, match=advice):
        check(**changes)
