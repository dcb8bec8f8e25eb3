"""Compares a model's memory with its device's: before loading, to refuse a model that is too
large, and after loading, to choose how many sequences fit beside the weights."""

import gc
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hippo.base.heap import trim_heap
from hippo.catalog.sizes import GIB, MOST_AUTO_SLOTS, USED_SHARE, slots_that_fit
from hippo.errors import ModelLoadError
from hippo.models.interface.plan import LoadPlan

_log = logging.getLogger(__name__)

_CPU_SHARE = 0.5  # other processes need the rest of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory that one process of a model needs on its device, in bytes."""

    name: str  # the model's
    context_length: int  # tokens of one sequence
    slot_tokens: int  # tokens of one sequence that are cached
    device: torch.device
    dtype: torch.dtype  # as served
    form: str = ""  # what to say of the weights after their dtype
    num_processes: int = 1  # ranks on this device
    weight_bytes: int  # all ranks on this device together
    slot_bytes: int  # cache of one sequence
    work_bytes: int  # activations
    packing_bytes: int = 0  # copies of weights while they are joined and packed, before activations
    reserved_bytes: int = 0  # caches of earlier media
    host_bytes: int = 0  # on the host, while all ranks read weights to GPUs


def check_fits(plan: LoadPlan, needs: MemoryNeeds) -> None:
    """Raises ModelLoadError if weights, activations, reserved bytes and the plan's slots (one, with
    ``num_slots`` None) exceed the device's free memory or the budget, or if the host's free memory
    is too small to read the weights."""
    num_slots = plan.num_slots or 1
    device, weight_bytes = needs.device, needs.weight_bytes
    work_bytes = needs.num_processes * max(needs.work_bytes, needs.packing_bytes)
    cache_bytes = num_slots * needs.num_processes * needs.slot_bytes
    needed = weight_bytes + work_bytes + cache_bytes + needs.reserved_bytes
    available = _left_bytes(device, plan.budget_bytes)
    if needed <= available:
        _check_host(needs)
        return
    weights = str(needs.dtype).removeprefix("torch.") + needs.form
    advice = f"lower --slots, --max-context-length or {_cache_flags(device)}, or use "
    if needs.dtype == torch.float32 or (needs.dtype == torch.float16 and device.type == "cpu"):
        advice += "--dtype bfloat16, "
    elif plan.tensor_parallel == 1 and not needs.form:
        advice += "--quantization int8 or nf4, "
    advice += "a smaller model or another --device"
    slots = f"{num_slots} {'slot' if num_slots == 1 else 'slots'}"
    room = f"{device} has {_gib(available)} free"
    if available < available_bytes(device):
        room = f"--memory-gib leaves {_gib(available)}"
    raise ModelLoadError(
        f"{needs.name} does not fit: it needs about {_gib(needed)} ({_gib(weight_bytes)} of "
        f"weights in {weights}, {_gib(cache_bytes)} of cache for {slots} "
        f"of {needs.slot_tokens} tokens, {_gib(needs.reserved_bytes)} for earlier media, "
        f"{_gib(work_bytes)} to work), and {room}: {advice}"
    )


def _check_host(needs: MemoryNeeds) -> None:
    available = available_bytes(torch.device("cpu"))
    if needs.host_bytes > available:
        raise ModelLoadError(
            f"{needs.name} cannot be read: reading its weights takes about "
            f"{_gib(needs.host_bytes)} of this machine's own memory, of which {_gib(available)} "
            "are free: end other processes, or give the service more memory"
        )


def left_for_slots(plan: LoadPlan, needs: MemoryNeeds) -> int:
    """Returns the bytes that each process on the device may allocate beside its loaded weights."""
    free_memory(needs.device)
    return _left_bytes(needs.device, plan.budget_bytes) // needs.num_processes


def free_memory(device: torch.device) -> None:
    """Gives free blocks that the allocator keeps back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


def fitting_slots(plan: LoadPlan, needs: MemoryNeeds, left_bytes: int) -> int:
    """Returns how many slots fit into ``left_bytes`` (see left_for_slots)."""
    share = USED_SHARE if needs.device.type == "cuda" else _CPU_SHARE
    return slots_that_fit(
        left_bytes,
        slot_bytes=needs.slot_bytes,
        work_bytes=needs.work_bytes,
        reserved_bytes=needs.reserved_bytes,
        used_share=share if plan.budget_bytes is None else 1.0,
    )


def _cache_flags(device: torch.device) -> str:
    """Returns the flags that reserve memory for earlier media."""
    return "--vision-cache-mb" + (" or --media-cache-mb" if device.type == "cpu" else "")


def choose_slots(plan: LoadPlan, needs: MemoryNeeds, num_fitting: int) -> int:
    """Returns the plan's number of slots, or ``num_fitting`` up to MOST_AUTO_SLOTS, and logs it.

    Raises ModelLoadError if the plan leaves the number open and no slot fits.
    """
    if plan.num_slots is not None:
        return plan.num_slots
    if num_fitting < 1:
        raise no_room(plan, needs)
    num_slots = min(num_fitting, MOST_AUTO_SLOTS)
    _log.info(
        "memory of %s: %s, and %d fit beside the weights%s",
        needs.device,
        _slot(needs),
        num_fitting,
        "" if num_slots == num_fitting else f"; {num_slots} slots are used (--slots for more)",
    )
    return num_slots


def no_room(plan: LoadPlan, needs: MemoryNeeds) -> ModelLoadError:
    """Returns the error of a plan for which no slot fits beside the loaded weights."""
    device, number = needs.device, plan.num_slots
    what = "no slot fits" if number is None else f"{number} slots do not fit"
    flag = "--max-context-length" if number is None or number == 1 else "--slots"
    return ModelLoadError(
        f"{needs.name}: {what} beside the weights: {_slot(needs)}, and {device} has "
        f"{_gib(_left_bytes(device, plan.budget_bytes))} left, room to work included: lower "
        f"{flag} or {_cache_flags(device)}, or raise --memory-gib if it is set"
    )


def _slot(needs: MemoryNeeds) -> str:
    cached = ""
    if needs.slot_tokens < needs.context_length:
        cached = f", of which {needs.slot_tokens} are cached,"
    return f"a sequence of {needs.context_length} tokens{cached} takes {_gib(needs.slot_bytes)}"


def _left_bytes(device: torch.device, budget_bytes: int | None) -> int:
    """Returns the bytes that this process may still allocate."""
    available = available_bytes(device)
    if budget_bytes is None:
        return available
    return max(0, min(available, budget_bytes - taken_bytes(device)))


def taken_bytes(device: torch.device) -> int:
    """Returns the bytes that this process uses; on a CUDA device, those that torch reserved."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device; for the CPU within the limit of the control group."""
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
    """Returns the UUIDs of the GPUs among ``devices``, equal in all processes and containers."""
    uuids = (
        str(torch.cuda.get_device_properties(device).uuid)
        for device in devices
        if device.type == "cuda"
    )
    return tuple(dict.fromkeys(uuids))


def cgroup_value(name: str) -> int | None:
    """Reads a number of the process's control group; None without the file or without a limit."""
    try:
        with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
