"""Reads a checkpoint's weights to their device by transformers."""

import contextlib
import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.quantized.forms import WeightForm

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards

# Weights that a checkpoint may have and the model does not use: scales of quantised activations
# and of a quantised cache, because both have their own dtype here.
_UNUSED_SUFFIXES = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale")

_LAYER = re.compile(r"\.layers\.(\d+)\.")

Report = Callable[[float], None]
"""Called with the share of the weights that is read."""


def read_weights(
    checkpoint: Checkpoint,
    model_class: Any,
    config: Any,
    dtype: torch.dtype,
    *,
    device: torch.device,
    form: WeightForm | None,
    shards: "Shards | None",
    report: Report,
    first_layers: int | None = None,
) -> Any:
    """Returns transformers' model, each weight read straight to the device.

    ``model_class`` is a class of transformers, ``config`` its configuration, ``dtype`` the dtype of
    plain weights. ``first_layers`` says that the configuration has only so many of the layers.
    Raises ModelLoadError for weights that are damaged, missing or left over.
    """
    options: dict[str, Any] = {"device_map": {"": device}}
    if shards is not None:
        options = shards.loading_options()
    elif form is not None:
        options |= form.loading_options(model_class, config, dtype)
    if first_layers is not None:
        options["config"] = config
    is_one_by_one = form is not None and not form.is_kept
    try:
        one_by_one = _sequential() if is_one_by_one else contextlib.nullcontext()
        with reported(report), _separate_weights(), one_by_one:
            model, problems = model_class.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                **options,
            )
    except (OSError, ImportError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelLoadError(f"{checkpoint.name}: its weights cannot be read: {reason}") from error
    own_unused = () if form is None else form.unused_suffixes
    if first_layers is not None:
        kept = itertools.filterfalse(_is_later(first_layers), problems["unexpected_keys"])
        problems["unexpected_keys"] = list(kept)
    _check_complete(checkpoint.name, problems, (*_UNUSED_SUFFIXES, *own_unused))
    if form is not None:
        form.prepare_modules(model, dtype)
    return model if shards is None else model.to(device)


def _is_later(first_layers: int) -> Callable[[str], bool]:
    """Returns whether a weight belongs to a decoder layer behind the first ones."""

    def check(key: str) -> bool:
        found = _LAYER.search(key)
        return found is not None and int(found[1]) >= first_layers

    return check


def _check_complete(name: str, problems: dict[str, Any], unused_suffixes: tuple[str, ...]) -> None:
    lacking = sorted(problems["missing_keys"]) + sorted(map(str, problems["mismatched_keys"]))
    unused = sorted(key for key in problems["unexpected_keys"] if not key.endswith(unused_suffixes))
    for keys, what in ((lacking, "missing or of another shape"), (unused, "not in the model")):
        if keys:
            raise ModelLoadError(
                f"{name}: its weights do not fit its configuration; {what}: "
                f"{', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
            )


@contextlib.contextmanager
def reported(report: Report) -> Iterator[None]:
    """Calls ``report`` in place of transformers' progress bars."""
    logging: Any = importlib.import_module("transformers").utils.logging

    def follow(items: Iterable[Any], **_options: Any) -> Iterator[Any]:
        total = len(items)  # type: ignore[arg-type]  # transformers gives a dictionary's items
        for count, item in enumerate(items, 1):
            yield item
            report(count / total)

    previous = logging.set_tqdm_hook(lambda _tqdm, args, kwargs: follow(*args, **kwargs))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


@contextlib.contextmanager
def _separate_weights() -> Iterator[None]:
    """Gives each weight memory of its own. transformers would allocate one piece for all of them,
    and what weights leave in it that are joined later could not be given back to the device."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    name = "caching_allocator_warmup"
    previous = getattr(modeling, name, None)
    setattr(modeling, name, lambda *_arguments: None)
    try:
        yield
    finally:
        setattr(modeling, name, previous)


@contextlib.contextmanager
def _sequential() -> Iterator[None]:
    """Makes transformers read a weight when the one before it is dequantised; its threads would
    read all quantised weights meanwhile."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    previous = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if previous is not None:
            os.environ[name] = previous
