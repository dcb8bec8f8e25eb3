"""The papers' pairs, as machines: shapes by :mod:`hippo.sizes`, times by :mod:`.hardware`."""

from __future__ import annotations

from dataclasses import dataclass

from hippo.errors import InvalidRequestError
from hippo.simulation.hardware import Placement
from hippo.simulation.machine import Machine
from hippo.sizes import ModelShape, find_shape

_QWEN, _LLAVA = "Qwen/Qwen2.5-VL-{}-Instruct", "llava-hf/llava-onevision-qwen2-{}-ov-hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A draft and a target of one family, with the prompt of the papers' set-up."""

    name: str
    title: str
    draft: ModelShape
    target: ModelShape
    num_target_gpus: int = 1  # the fewest H200 that hold it
    num_visual_tokens: int = 25_000
    num_text_tokens: int = 100

    def num_draft_tokens(self, ratio: float) -> int:
        """Prompt tokens that the draft sees when ``ratio`` of the visual ones are pruned."""
        return self.num_text_tokens + round((1 - ratio) * self.num_visual_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the target sees."""
        return self.num_text_tokens + self.num_visual_tokens


def _pair(name: str, family: str, draft: str, target: str, num_target_gpus: int = 1) -> ModelPair:
    title = "Qwen2.5-VL" if family is _QWEN else "LLaVA-OneVision"
    return ModelPair(
        name=name,
        title=f"{title} {draft.upper()} / {target.upper()}",
        draft=find_shape(family.format(draft)),
        target=find_shape(family.format(target)),
        num_target_gpus=num_target_gpus,
    )


PAIRS = {
    pair.name: pair
    for pair in (
        _pair("qwen-7b-72b", _QWEN, "7B", "72B", num_target_gpus=2),
        _pair("qwen-7b-32b", _QWEN, "7B", "32B"),
        _pair("qwen-3b-7b", _QWEN, "3B", "7B"),
        _pair("llava-0.5b-7b", _LLAVA, "0.5b", "7b"),
        _pair("llava-7b-72b", _LLAVA, "7b", "72b", num_target_gpus=2),
    )
}


def find_pair(name: str) -> ModelPair:
    """A pair by its name; raises InvalidRequestError with the names there are."""
    if name not in PAIRS:
        raise InvalidRequestError(f"unknown pair {name!r}; choose one of {', '.join(PAIRS)}")
    return PAIRS[name]


def pair_machine(
    pair: ModelPair,
    *,
    target: Placement,
    draft: Placement,
    ratio: float = 0.9,
    num_new_tokens: int = 256,
    leg_ms: float = 0.25,
    message_ms: float = 0.05,
    scheduling_ms: float = 0.1,
    scored_share: float = 0.5,
) -> Machine:
    """The pair's costs; raises InvalidRequestError when it does not fit into the GPUs' memory.

    ``ratio``: share of visual tokens the draft does not see; ``leg_ms``: one message one way;
    ``scheduling_ms``: the target's host between two steps; ``scored_share``: the share of the
    target's layers after which the selection is known, and the draft may begin its prefill.
    """
    context = pair.num_prompt_tokens + num_new_tokens // 2
    draft_tokens = pair.num_draft_tokens(ratio)
    draft_context = draft_tokens + num_new_tokens // 2
    target.check(pair.target, pair.num_prompt_tokens + num_new_tokens)
    draft.check(pair.draft, draft_tokens + num_new_tokens)
    prefill_ms = target.prefill_ms(pair.target, pair.num_prompt_tokens)
    return Machine(
        name=f"{pair.title} on {draft.num_gpus} + {target.num_gpus} {target.gpu.name}",
        target=target.step_time(pair.target, context),
        draft=draft.step_time(pair.draft, draft_context),
        target_prefill_ms=prefill_ms,
        draft_prefill_ms=draft.prefill_ms(pair.draft, draft_tokens),
        selection_ms=scored_share * prefill_ms,
        leg_ms=leg_ms,
        draft_message_ms=message_ms,
        target_message_ms=message_ms,
        target_scheduling_ms=scheduling_ms,
        sources=(
            f"step times from bytes over bandwidth: {target.gpu.bandwidth_gbs:g} GB/s x "
            f"{target.bandwidth_share:g}, {target.num_gpus} GPUs share the target, "
            f"{target.layer_us:g} us a layer, {target.sum_us:g} us a sum, bfloat16",
            f"{pair.num_visual_tokens:,} visual tokens, {ratio:.0%} of them pruned for the draft",
        ),
    )
