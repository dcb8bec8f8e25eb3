"""What a model will take in memory, compared with what its device has, before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hippo.errors import ModelLoadError


def check_fits(
    name: str,
    *,
    weight_bytes: int,
    cache_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    max_context_length: int,
    reserved_bytes: int = 0,
) -> None:
    """Raises ModelLoadError when weights and cache exceed the device's free memory.

    A tenth is added to the weights for activations and buffers, and ``reserved_bytes`` for what
    the vision cache may hold.
    """
    needed = weight_bytes + weight_bytes // 10 + cache_bytes + reserved_bytes
    available = available_bytes(device)
    if needed <= available:
        return
    if needed - reserved_bytes <= available:
        advice = "lower --vision-cache-mb"
    elif cache_bytes > weight_bytes:
        advice = "lower --slots or --max-context-length"
    elif dtype == torch.float32:
        advice = "use --dtype bfloat16, a smaller model or another --device"
    else:
        advice = "use a smaller model or another --device, or lower --slots"
    raise ModelLoadError(
        f"{name} does not fit: it needs about {_gib(needed)} ({_gib(weight_bytes)} of weights in "
        f"{str(dtype).removeprefix('torch.')}, {_gib(cache_bytes)} of cache for {num_slots} slots "
        f"of {max_context_length} tokens, {_gib(reserved_bytes)} for earlier media, and room to "
        f"work), and {device} has {_gib(available)} "
        f"free: {advice}"
    )


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; for the CPU within this process's control group, if limited."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil  # type: ignore[import-untyped]

    available = int(psutil.virtual_memory().available)
    limit, used = cgroup_value("memory.max"), cgroup_value("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def device_uuids(devices: Iterable[torch.device]) -> tuple[str, ...]:
    """Identities of the GPUs among ``devices``, the same in every process and container."""
    uuids = (
        str(torch.cuda.get_device_properties(device).uuid)
        for device in devices
        if device.type == "cuda"
    )
    return tuple(dict.fromkeys(uuids))


def cgroup_value(name: str) -> int | None:
    """A number that the process's control group says; None without one, or without a limit."""
    try:
        with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
