"""How much of a device's memory is in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hippo.models.memory import cgroup_value


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In use, and in all; on a CPU of this process and of what it may have."""

    used_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """As the driver tells it; as the kernel does for a CPU. Any thread."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(used_bytes=int(total - free), total_bytes=int(total))
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = cgroup_value("memory.max")
    return DeviceMemory(
        used_bytes=int(psutil.Process().memory_info().rss),
        total_bytes=total if limit is None else min(total, limit),
    )
