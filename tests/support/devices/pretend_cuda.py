"""A CUDA device that is pretended, so that device placement is tested where there is no GPU.

Inside ``pretend_cuda`` tensors can be made on and moved to ``cuda:0``. They hold their numbers on
the CPU, where every operation really runs, but they say that they are on the GPU, and an operation
is refused as on a real one when its tensors are on different devices. Whatever would make the host
wait for a GPU is counted. What kernels a GPU chooses, and what they give, this cannot tell.
"""

import contextlib
import functools
import importlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.devices.flash_operator import flash_operator

CUDA = torch.device("cuda:0")
_GIB = 1 << 30

# Of CPU tensors beside CUDA ones, what real kernels take: numbers without dimensions, what is
# copied, and places to index by.
_TAKES_BOTH = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
_OF_THE_HOST = ("is_pinned", "_pin_memory", "histc")  # see run_pretended
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique2")


class PretendTensor(torch.Tensor):
    """A tensor that says it is on the GPU; ``numbers`` are on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "PretendTensor":
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CUDA,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached outside of ``pretend_cuda`` only."""
        return run_pretended(func, args, kwargs or {}, [])


def run_pretended(func: Any, args: Any, kwargs: Any, waits: list[str]) -> Any:
    """Runs an operation on the numbers; its results are where they would be."""
    name = func.overloadpacket.__name__
    flat = tree_leaves((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    pretended = [each for each in tensors if isinstance(each, PretendTensor)]
    devices = [each for each in flat if isinstance(each, torch.device)]
    is_made_there = any(device.type == "cuda" for device in devices)
    if not (pretended or is_made_there or name in _OF_THE_HOST or "pin_memory" in kwargs):
        return func(*args, **kwargs)
    for each in pretended:
        if each.shape != each.numbers.shape:  # somebody set its ``data``
            raise RuntimeError(f"{func}: a tensor of shape {tuple(each.shape)}, emptied before")
    ordinary = [each for each in tensors if _is_here(each)]
    if pretended and ordinary and name not in _TAKES_BOTH:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu"
        )
    if name in ("index", "index_put", "index_put_") and not isinstance(args[0], PretendTensor):
        assert not pretended, f"{func}: indices are on cuda:0, what is indexed is on the cpu"
    is_copy = name == "copy_"
    is_copied_here = is_copy and not isinstance(args[0], PretendTensor)
    is_blocking = not (args[2:3] == (True,) if is_copy else kwargs.get("non_blocking"))
    does_wait = False
    if ordinary and (is_made_there or (is_copy and pretended and args[1] is ordinary[0])):
        does_wait = is_blocking or _is_paged(ordinary[0])
    if pretended:
        does_wait |= name in _WAITS or bool(devices and not is_made_there)
        does_wait |= is_copied_here and is_blocking
        does_wait |= name in ("index", "index_put_") and any(
            index is not None and _is_masking(index) for index in args[1]
        )
    if does_wait:
        waits.append(f"{name} at {_caller()}")
    if name == "is_pinned":
        return getattr(args[0], "is_pretended_pinned", False)
    if name == "_pin_memory":
        pinned = args[0].clone()
        pinned.is_pretended_pinned = True
        return pinned
    args, kwargs = tree_map(_really, (args, kwargs))
    kwargs.pop("pin_memory", None)
    if name == "histc":  # a CPU counts no integers
        args = (args[0].double(), *args[1:])
    result = func(*args, **kwargs)
    if name == "histc":
        result = result.int()
    goes_there = pretended and not (devices or is_copied_here or name == "_local_scalar_dense")
    if not (goes_there or is_made_there):
        return result
    known = {id(each.numbers): each for each in pretended}  # what an operation in place gives back

    def pretended_one(each: Any) -> Any:
        is_new = isinstance(each, torch.Tensor) and id(each) not in known
        return PretendTensor(each) if is_new else known.get(id(each), each)

    return tree_map(pretended_one, result)


def _is_here(tensor: torch.Tensor) -> bool:
    """Whether it is on the CPU and more than a number."""
    return not isinstance(tensor, PretendTensor) and tensor.dim() > 0


def _is_masking(index: torch.Tensor) -> bool:
    """Whether the host must know the numbers to index by it, or to move it."""
    return index.dtype in (torch.bool, torch.uint8) or not isinstance(index, PretendTensor)


def _is_paged(source: torch.Tensor) -> bool:
    """Whether a copy from there is more than the driver stages at once."""
    return source.nbytes > 1 << 16 and not getattr(source, "is_pretended_pinned", False)


def _really(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.numbers
    is_there = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_there else value


_ROOT = Path(__file__).resolve().parents[3]  # a folder that may itself be called hippo
_PROJECT = (f"{_ROOT}/hippo/", f"{_ROOT}/services/")


def _caller() -> str:
    """The project's line that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_PROJECT):
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return "a test"


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, waits: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_pretended(func, args, kwargs or {}, self.waits)


class _Functions(TorchFunctionMode):
    """Methods whose bindings ask for the real device, by operations that are dispatched."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits
        self._instead: dict[Any, Any] = {
            torch.Tensor.__getitem__: self._get_item,
            torch.Tensor.__setitem__: self._set_item,
            torch.Tensor.contiguous: lambda x: (
                x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            ),
            torch.Tensor.copy_: lambda x, source, non_blocking=False: torch.ops.aten.copy_.default(
                x, source, non_blocking
            ),
            torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
            **{
                getattr(torch.Tensor, name): functools.partial(self._read, name)
                for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")
            },
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._instead and isinstance(args[0], PretendTensor):
            return self._instead[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _read(self, name: str, tensor: PretendTensor) -> Any:
        self._waits.append(f"{name.strip('_')} at {_caller()}")
        return getattr(tensor.numbers.clone(), name)()

    def _get_item(self, tensor: PretendTensor, index: Any) -> torch.Tensor:
        return PretendTensor(tensor.numbers[self._places(index)])

    def _set_item(self, tensor: PretendTensor, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and _is_here(value):
            self._waits.append(f"copy_ at {_caller()}")
        tensor.numbers[self._places(index)] = _really(value)

    def _places(self, index: Any) -> Any:
        """What to index the numbers by."""
        if any(isinstance(each, torch.Tensor) and _is_masking(each) for each in tree_leaves(index)):
            self._waits.append(f"index at {_caller()}")
        return tree_map(_really, index)


class _Event:
    """Has always happened."""

    def record(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


@contextlib.contextmanager
def pretend_cuda() -> Iterator[list[str]]:
    """There is one CUDA device meanwhile; gives what waits for it, as it does.

    Tensors are made on it in this thread; in another one, inside ``on_thread``.
    """
    waits: list[str] = []
    with pretended_device(), on_thread(waits):
        yield waits


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    properties = SimpleNamespace(
        uuid="GPU-pretended", name="pretended", total_memory=80 * _GIB, major=9, minor=0
    )
    instead: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda _device: None,
        "device": lambda _device: contextlib.nullcontext(),
        "mem_get_info": lambda _device=None: (64 * _GIB, 80 * _GIB),
        "memory_reserved": lambda _device=None: 0,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _device=None: properties,
        "_lazy_init": lambda: None,
        "Event": _Event,
        "current_stream": lambda _device=None: None,
    }
    mode: Any = torch.inference_mode  # its tensors know no versions, which subclasses need
    without_gradients = torch.no_grad
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, function in instead.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(mode, "__enter__", without_gradients.__enter__))
        stack.enter_context(mock.patch.object(mode, "__exit__", without_gradients.__exit__))
        stack.enter_context(flash_operator())
        stack.enter_context(_fused_norm())
        # transformers reads weights in threads, which know nothing of this device.
        stack.enter_context(mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        yield


@contextlib.contextmanager
def _fused_norm() -> Iterator[None]:
    """A GPU has a kernel for RMS norms, so torch does not take them apart."""
    library: Any = importlib.import_module("torch.library").Library("aten", "IMPL")
    try:
        library.impl("_fused_rms_norm", run_pretended, "CUDA")  # PretendTensor is asked instead
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def on_thread(waits: list[str]) -> Iterator[None]:
    """This thread makes tensors on the device meanwhile; ``waits`` takes what waits for it."""
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Dispatch(waits), _Functions(waits):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
