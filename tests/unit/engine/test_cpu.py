"""How many threads torch uses, thread by thread."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gateway.server import pin_to_core
from hippo.engine.cpu import compute_alone, prepare_cpu, set_threads_here
from hippo.errors import HippoError


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen_in_a_thread(prepare: Callable[[], None], *, then: Callable[[], None]) -> int:
    """The number in a thread that ran ``prepare``, after ``then`` ran in another one."""
    seen: list[int] = []
    ready, go = threading.Event(), threading.Event()

    def work() -> None:
        prepare()
        ready.set()
        go.wait()
        torch.ones(1 << 16).exp_()  # the first parallel operation of this thread
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    other = threading.Thread(target=then)
    other.start()
    other.join()
    go.set()
    thread.join()
    return seen[0]


@pytest.mark.usefixtures("two_threads")
def test_a_thread_keeps_its_threads_when_another_one_sets_its_own() -> None:
    assert seen_in_a_thread(lambda: set_threads_here(2), then=compute_alone) == 2
    assert seen_in_a_thread(compute_alone, then=lambda: set_threads_here(2)) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux' affinities")
@pytest.mark.parametrize("core", [1000, -1, 1 << 70])
def test_a_core_that_is_not_there_is_refused_with_those_that_are(core: int) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(HippoError, match=f"--cpu-core {core}: this process may run on cores"):
        prepare_cpu(core, None)
    with pytest.raises(HippoError, match=f"--cpu-core {core}: this process may run on cores"):
        pin_to_core(core)
    assert os.sched_getaffinity(0) == before
