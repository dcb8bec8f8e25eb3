"""Transfers of tensors between a model and its prefill helper, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hippo.models.products.group import use_loopback

_JOIN_TIMEOUT = timedelta(minutes=1)  # both processes have loaded their layers
_TIMEOUT = timedelta(hours=1)  # a helper that is slow is left alone long before


class Link:
    """This process's end; rank 0 is the model's process, rank 1 the helper's.

    Each direction has a process group of its own, because NCCL would run transfers of one group in
    one order. ``device`` is where transferred tensors have to be: the process's own GPU if both
    processes have one each (NCCL refuses two processes on one), else the CPU (gloo).
    """

    def __init__(self, path: str, rank: int, device: torch.device, *, has_nccl: bool) -> None:
        """Waits for the other process to join by the file ``path``."""
        use_loopback()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            init_method=Path(path).as_uri(),
            rank=rank,
            world_size=2,
            timeout=_JOIN_TIMEOUT,
        )
        groups = [dist.new_group([0, 1], timeout=_TIMEOUT) for _ in range(2)]
        self._peer = 1 - rank
        self._sending, self._receiving = groups[rank], groups[1 - rank]
        self.device = device if has_nccl else torch.device("cpu")

    def send(self, tensor: torch.Tensor) -> Any:
        """Begins to send a contiguous tensor, which must not change until the returned work's
        ``wait`` has returned."""
        return dist.isend(_bytes_of(tensor), self._peer, group=self._sending)

    def receive(self, tensor: torch.Tensor) -> None:
        """Overwrites a contiguous tensor by what the other process sends next; returns when it is
        there. Raises RuntimeError if the other process has ended."""
        dist.recv(_bytes_of(tensor), self._peer, group=self._receiving)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Leaves the groups."""
        dist.destroy_process_group()


def has_nccl_between(device: torch.device, other: torch.device) -> bool:
    """Returns whether NCCL can connect processes on these devices."""
    return device.type == other.type == "cuda" and device != other and dist.is_nccl_available()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
