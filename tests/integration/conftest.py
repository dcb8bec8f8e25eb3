"""Checks that hold after every integration test, and models that several of them share."""

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.devices.threads import one_thread as one_thread
from tests.support.models.pairs import Pair, load
from tests.support.running.zygote import Zygote


@pytest.fixture(autouse=True)
def _no_engine_thread_is_left() -> Iterator[None]:
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread.name == "device" or thread.name.startswith(("prepare", "masks"))
    ]
    assert not left, f"threads outlived their service: {left}"


@pytest.fixture
def zygote(start_zygote: Callable[[], Zygote]) -> Zygote:
    """The process that services are forked from."""
    return start_zygote()


@pytest.fixture(
    scope="module",
    params=[
        ("target_checkpoint", "draft_checkpoint"),
        ("llava_checkpoint", "llava_draft_checkpoint"),
        ("internvl_checkpoint", "internvl_draft_checkpoint"),
    ],
    ids=["qwen2.5-vl", "llava-onevision", "internvl"],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Of each kind of prompt one."""
    return Pair(*(load(request.getfixturevalue(name)) for name in request.param))
