"""What a model takes in memory, compared with what its device has: before loading, to refuse what
cannot be, and after it, to see how many sequences fit beside the weights."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hippo.errors import ModelLoadError
from hippo.models.plan import LoadPlan
from hippo.sizes import GIB, MOST_AUTO_SLOTS, USED_SHARE, slots_that_fit

_log = logging.getLogger(__name__)

_CPU_SHARE = 0.5  # of free memory that is not the service's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a process of a model takes of its device, in bytes."""

    name: str  # of the model
    device: torch.device
    dtype: torch.dtype  # as served
    num_processes: int = 1  # that share the device alike
    weight_bytes: int  # of all these processes
    slot_bytes: int  # of one sequence
    work_bytes: int  # activations


def check_fits(plan: LoadPlan, needs: Needs) -> None:
    """Raises ModelLoadError when weights, activations, earlier media and the slots (one, if their
    number is left open) exceed the device's free memory or the budget."""
    num_slots = plan.num_slots or 1
    device, weight_bytes = needs.device, needs.weight_bytes
    work_bytes = needs.num_processes * needs.work_bytes
    cache_bytes = num_slots * needs.num_processes * needs.slot_bytes
    needed = weight_bytes + work_bytes + cache_bytes + plan.reserved_bytes
    available = _left_bytes(device, plan.budget_bytes)
    if needed <= available:
        return
    is_budget = available < available_bytes(device)
    is_half_on_cpu = needs.dtype == torch.float16 and device.type == "cpu"
    weights = str(needs.dtype).removeprefix("torch.")
    weights += ", in float32 till they are packed" if is_half_on_cpu else ""
    if needed - plan.reserved_bytes <= available:
        advice = f"lower {_cache_flags(device)}"
    elif cache_bytes > weight_bytes:
        advice = "lower --slots or --max-context-length"
    elif needs.dtype == torch.float32 or is_half_on_cpu:
        advice = "use --dtype bfloat16, a smaller model or another --device"
    elif num_slots > 1:
        advice = "use a smaller model or another --device, or lower --slots"
    else:
        advice = "use a smaller model or another --device"
    slots = f"{num_slots} {'slot' if num_slots == 1 else 'slots'}"
    raise ModelLoadError(
        f"{needs.name} does not fit: it needs about {_gib(needed)} ({_gib(weight_bytes)} of "
        f"weights in {weights}, {_gib(cache_bytes)} of cache for {slots} "
        f"of {plan.max_context_length} tokens, {_gib(plan.reserved_bytes)} for earlier media, "
        f"{_gib(work_bytes)} to work), and "
        + (f"--memory-gib leaves {_gib(available)}" if is_budget else "")
        + ("" if is_budget else f"{device} has {_gib(available)} free")
        + f": {advice}"
    )


def fitting_slots(plan: LoadPlan, needs: Needs) -> int:
    """Slots that fit beside what is loaded by now."""
    device = needs.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind counts as taken
    share = USED_SHARE if device.type == "cuda" else _CPU_SHARE
    return slots_that_fit(
        _left_bytes(device, plan.budget_bytes) // needs.num_processes,
        slot_bytes=needs.slot_bytes,
        work_bytes=needs.work_bytes,
        reserved_bytes=plan.reserved_bytes,
        used_share=share if plan.budget_bytes is None else 1.0,
    )


def _cache_flags(device: torch.device) -> str:
    """What sets the room for earlier media."""
    return "--vision-cache-mb" + (" or --media-cache-mb" if device.type == "cpu" else "")


def choose_slots(plan: LoadPlan, needs: Needs, num_fitting: int) -> int:
    """The plan's number, or as many as fit up to MOST_AUTO_SLOTS, which is logged.

    Raises ModelLoadError when not even one fits.
    """
    if plan.num_slots is not None:
        return plan.num_slots
    device = needs.device
    slot = f"a sequence of {plan.max_context_length} tokens takes {_gib(needs.slot_bytes)}"
    if num_fitting < 1:
        raise ModelLoadError(
            f"{needs.name}: no slot fits beside the weights: {slot}, and {device} has "
            f"{_gib(_left_bytes(device, plan.budget_bytes))} left, room to work included: lower "
            f"--max-context-length or {_cache_flags(device)}, or raise --memory-gib if it is set"
        )
    num_slots = min(num_fitting, MOST_AUTO_SLOTS)
    _log.info(
        "memory of %s: %s, and %d fit beside the weights%s",
        device,
        slot,
        num_fitting,
        "" if num_slots == num_fitting else f"; {num_slots} slots are used (--slots for more)",
    )
    return num_slots


def _left_bytes(device: torch.device, budget_bytes: int | None) -> int:
    """What this process may still take."""
    available = available_bytes(device)
    if budget_bytes is None:
        return available
    return max(0, min(available, budget_bytes - taken_bytes(device)))


def taken_bytes(device: torch.device) -> int:
    """What this process has of the device; of a CUDA device by torch's account."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; for the CPU within this process's control group, if limited."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil

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
    return f"{num_bytes / GIB:.2f} GiB"
