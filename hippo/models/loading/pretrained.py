"""Reads and builds what was resolved: transformers' model, decoder stack, cache and runners."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hippo.catalog.sizes import ModelShape
from hippo.errors import ModelLoadError
from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.ranges import find_flash
from hippo.models.interface.context import LEAST_CONTEXT, choose_context
from hippo.models.loading.memory import (
    check_fits,
    choose_slots,
    device_uuids,
    fitting_slots,
    left_for_slots,
    no_room,
)
from hippo.models.loading.resolve import Resolved
from hippo.models.loading.weights import read_weights
from hippo.models.products.linear import MakeLinear, is_plain
from hippo.models.runners.captured import make_fixed_runner
from hippo.models.runners.decoder import DecoderStack
from hippo.models.runners.eager import EagerRunner
from hippo.models.runners.fixed import FixedRunner
from hippo.types import ModelInfo

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A loaded checkpoint, from which CachedModel and the parts of its family are made."""

    model: Any  # transformers' model with its head, in evaluation mode, on the device
    processor: Any
    shape: ModelShape
    info: ModelInfo
    stack: DecoderStack  # holds the weights of the text model's layers, which are empty in model
    cache: KeyValueCache
    make_linear: MakeLinear  # makes products for the vision tower
    eager: EagerRunner
    fixed: FixedRunner | None  # None: the plan asks for no forwards of fixed shape


def read_model(resolved: Resolved, report: Callable[[float], None]) -> Any:
    """Returns transformers' model with its weights on the device; raises ModelLoadError before any
    weight is read if the memory is too small. ``report`` is called with the share that is read."""
    plan = resolved.plan
    context = plan.max_context_length or min(resolved.context_limit, LEAST_CONTEXT)
    check_fits(plan, resolved.needs(context))
    report(0.0)
    model = read_weights(
        resolved.checkpoint,
        resolved.model_class,
        resolved.config,
        resolved.working_dtype,
        device=resolved.device,
        form=resolved.form,
        shards=resolved.shards,
        report=report,
        first_layers=plan.first_layers,
    )
    model.eval().requires_grad_(False)
    if resolved.device.type == "cpu" and (resolved.form is None or not resolved.form.is_kept):
        packs = resolved.is_half_on_cpu or resolved.padded is not int
        _copy_from_files(model, all_weights=not packs)
    return model


def build(resolved: Resolved, model: Any) -> Pretrained:
    """Packs the layers of transformers' model, chooses context and slots by the memory beside them,
    and makes cache and runners; raises ModelLoadError. Every rank comes to the same choices."""
    plan, shards, tokenizer = resolved.plan, resolved.shards, resolved.processor.tokenizer
    num_ids = num_token_ids(tokenizer, resolved.config.text_config.vocab_size)
    stack = _make_stack(model, num_ids, resolved.make_linear, shards)
    if shards is not None:
        shards.warm_up(resolved.shape.hidden_size, resolved.working_dtype)
    left_bytes = left_for_slots(plan, resolved.needs(LEAST_CONTEXT))
    context = plan.max_context_length or _fitting_context(resolved, left_bytes)
    cache = _make_cache(resolved, context, left_bytes)
    embedding = model.get_input_embeddings().weight
    flash = find_flash(cache, stack.groups)
    info = ModelInfo(
        name=plan.served_name or resolved.checkpoint.name,
        family=resolved.checkpoint.model_type,
        device=str(resolved.device),
        dtype=str(resolved.dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(tokenizer),
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        num_token_ids=num_ids,
        end_token_ids=end_token_ids(model.generation_config, tokenizer),
        max_context_length=context,
        num_slots=cache.shape.num_slots,
        num_parameters=resolved.shape.num_parameters,
        device_uuids=device_uuids(resolved.devices),
        cache_tokens=cache.shape.capacity,
    )
    return Pretrained(
        model=model,
        processor=resolved.processor,
        shape=resolved.shape,
        info=info,
        stack=stack,
        cache=cache,
        make_linear=resolved.make_linear,
        eager=EagerRunner(stack, cache, embedding, flash, padded=resolved.padded),
        fixed=make_fixed_runner(plan, stack, cache, embedding, flash),
    )


def _fitting_context(resolved: Resolved, left_bytes: int) -> int:
    """Returns the context length that fits beside the loaded weights on every rank's device;
    raises ModelLoadError if none does."""
    plan, limit = resolved.plan, resolved.context_limit

    def fits(context: int, num_slots: int) -> bool:
        return fitting_slots(plan, resolved.needs(context), left_bytes) >= num_slots

    context = choose_context(limit, plan.num_slots, fits)
    if resolved.shards is not None:
        context = resolved.shards.least(context)
    least = min(limit, LEAST_CONTEXT)
    if context < least:
        raise no_room(plan, resolved.needs(least))
    _log.info(
        "context of %d tokens, of the %d that the checkpoint allows (--max-context-length)",
        context,
        limit,
    )
    return context


def _make_cache(resolved: Resolved, context: int, left_bytes: int) -> KeyValueCache:
    """Allocates as many slots as the plan names, or as fit on every rank's device."""
    needs = resolved.needs(context)
    num_fitting = fitting_slots(resolved.plan, needs, left_bytes)
    if resolved.shards is not None:
        num_fitting = resolved.shards.least(num_fitting)
    num_slots = choose_slots(resolved.plan, needs, num_fitting)
    shape = replace(resolved.slot_shape(context), num_slots=num_slots)
    return KeyValueCache(shape, dtype=resolved.cache_dtype, device=resolved.device)


def _make_stack(
    model: Any, num_ids: int, make_linear: MakeLinear, shards: "Shards | None"
) -> DecoderStack:
    """Makes the decoder layers from the weights of transformers' modules, which become empty."""
    if shards is not None:
        shards.unwrap(model)
    head = model.lm_head
    stack = DecoderStack(model.model.language_model, head, num_ids, make_linear, shards)
    if is_plain(head) and not _is_tied(model):
        head.weight.data = head.weight.data.new_empty(0)  # the stack has the rows that it needs
    return stack


def _copy_from_files(model: Any, *, all_weights: bool) -> None:
    """Copies weights: all, or all but the weights of the layers' products, which are packed.

    Weights may be views of the mapped weight files; a file stays in memory as long as one of its
    weights is in use.
    """
    packed = {id(part.weight) for part in model.model.language_model.modules() if is_plain(part)}
    if not _is_tied(model):
        packed.add(id(model.lm_head.weight))
    for weight in model.parameters():
        if all_weights or id(weight) not in packed:
            weight.data = weight.data.clone()


def _is_tied(model: Any) -> bool:
    same: bool = model.lm_head.weight is model.get_input_embeddings().weight
    return same


def tokenizer_hash(tokenizer: Any) -> bytes:
    """SHA-256 of the tokenizer's id map; models with the same ids have the same hash, even if
    their ``vocab_size`` differs."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(int(token_id).to_bytes(8, "little"))
    return digest.digest()


def num_token_ids(tokenizer: Any, vocab_size: int) -> int:
    """Returns the tokenizer's largest id plus one, to which logits are cut.

    Raises ModelLoadError if that exceeds ``vocab_size``.
    """
    count = 1 + max(tokenizer.get_vocab().values())
    if count > vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {count} ids but the model only {vocab_size}: they are not of one "
            "checkpoint"
        )
    return int(count)


def end_token_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end a completion, from the generation configuration or the tokenizer."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
