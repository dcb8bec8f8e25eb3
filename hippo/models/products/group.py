"""The process group of a model's ranks: rendezvous and collectives."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hippo.errors import ModelLoadError

_TIMEOUT = timedelta(hours=1)  # ranks load at different speeds; no collective waits in between


class RankGroup:
    """This process's membership in the group of ranks; ``devices`` has one device per rank.

    The group is torch.distributed's default group, so a process has only one. All ranks must call
    the collectives in the same order. Collectives raise RuntimeError if a rank has ended.
    """

    def __init__(self, path: str, rank: int, devices: tuple[torch.device, ...]) -> None:
        """Waits for all ranks to join by the file ``path``, which only this user may access.
        torch's store on a port would be simpler, but listens on every network interface."""
        self.rank = rank
        self.devices = devices
        self.device = devices[rank]
        use_loopback()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            os.environ["LOCAL_RANK"] = str(self.device.index)  # transformers uses this device
        dist.init_process_group(
            backend_for(devices),
            init_method=Path(path).as_uri(),
            rank=rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` (contiguous) with rank 0's tensor."""
        with torch.inference_mode():
            dist.broadcast(tensor, 0)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites ``tensor`` (contiguous) with the sum over ranks, and returns it."""
        with torch.inference_mode():
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites ``tensor`` (contiguous) with the mean over ranks, and returns it."""
        with torch.inference_mode():
            return self.sum(tensor).div_(self.size)

    def concatenate(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns ``[rows, size * n]`` from the contiguous ``[rows, n]`` of every rank."""
        parts = list(columns.new_empty(self.size, *columns.shape).unbind(0))
        with torch.inference_mode():
            dist.all_gather(parts, columns)
        return torch.cat(parts, 1)

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()


def backend_for(devices: tuple[torch.device, ...]) -> str:
    """Returns torch's backend for collectives: gloo for CPU tensors, nccl for CUDA tensors.

    Raises ModelLoadError for devices that cannot form a group.
    """
    names = ", ".join(map(str, devices))
    if {device.type for device in devices} == {"cpu"}:
        if torch.accelerator.is_available():
            raise ModelLoadError(
                "tensor parallelism on the CPU of a machine with an accelerator: hide it "
                "(CUDA_VISIBLE_DEVICES=), or use it"
            )
        return "gloo"
    if len(set(devices)) < len(devices) or any(device.type != "cuda" for device in devices):
        raise ModelLoadError(f"tensor parallelism needs a CUDA device for every rank, not {names}")
    return "cpu:gloo,cuda:nccl"


def use_loopback() -> None:
    """Makes gloo and nccl use the loopback interface, because all ranks are on this machine."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
