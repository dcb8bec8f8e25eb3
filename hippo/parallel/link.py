"""Transfers of tensors between a model and its prefill helper, by torch.distributed."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hippo.models.products.group import use_loopback

_JOIN_TIMEOUT = timedelta(minutes=1)  # both processes are ready to join
_TIMEOUT = timedelta(minutes=10)  # a helper that is slow is left alone long before


class Link:
    """This process's end; rank 0 is the model's process, rank 1 the helper's.

    Tensors are sent from and to the CPU's memory, by gloo. NCCL between two GPUs would spare them
    the way through it, and needs streams of its own; it is not used before it has been run.
    """

    def __init__(self, path: str, rank: int) -> None:
        """Waits for the other process to join by the file ``path``."""
        use_loopback()
        store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
        store.set_timeout(_JOIN_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
        self._peer = 1 - rank
        self.device = torch.device("cpu")

    def send(self, tensor: torch.Tensor) -> Any:
        """Begins to send a contiguous tensor, which must not change until the returned work's
        ``wait`` has returned."""
        return dist.isend(_bytes_of(tensor), self._peer)

    def receive(self, tensor: torch.Tensor) -> None:
        """Overwrites a contiguous tensor by what the other process sends next; returns when it is
        there. Raises RuntimeError if the other process has ended."""
        dist.recv(_bytes_of(tensor), self._peer)

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
