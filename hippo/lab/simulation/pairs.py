"""The papers' pairs as machines; :mod:`hippo.catalog.sizes` gives shapes, :mod:`.hardware`
times."""

from dataclasses import dataclass

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import ModelShape, memory_of
from hippo.errors import InvalidRequestError
from hippo.lab.simulation.hardware import GPUS, Gpu, Placement, RooflineTime, helper_memory
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.traces import Trace, drawn_traces

_QWEN, _LLAVA = "Qwen/Qwen2.5-VL-{}-Instruct", "llava-hf/llava-onevision-qwen2-{}-ov-hf"
_MESSAGES = {
    "leg_ms": 0.25, "draft_message_ms": 0.05, "target_message_ms": 0.05, "target_scheduling_ms": 0.1
}  # fmt: skip
_SCORED_SHARE = 0.5  # share of the target's layers that run before the draft's prefill

NUM_NEW_TOKENS = 256
"""Tokens of a simulated answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A draft and a target of one family on GPUs, with the prompt sizes of the papers."""

    name: str
    title: str
    draft: ModelShape
    target: ModelShape
    gpu: Gpu = GPUS["h200"]
    num_target_gpus: int = 1
    num_visual_tokens: int = 25_000
    num_text_tokens: int = 100
    ratio: float = 0.9  # share of visual tokens pruned for the draft
    has_graphs: bool = True  # for models on one GPU; hippo has no graphs on several

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the target sees."""
        return self.num_text_tokens + self.num_visual_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Prompt tokens that the draft sees."""
        return self.num_text_tokens + round((1 - self.ratio) * self.num_visual_tokens)

    @property
    def _form(self) -> str:
        bits, share = self.target.layer_bits, self.target_place.packed_share
        if bits is None:
            return "bfloat16"
        return f"bfloat16, the target's layers in {bits:g} bits, read at x {share:g}"

    @property
    def target_place(self) -> Placement:
        """The target's GPUs."""
        has_graphs = self.has_graphs and self.num_target_gpus == 1
        return Placement(gpu=self.gpu, num_gpus=self.num_target_gpus, has_graphs=has_graphs)

    @property
    def draft_place(self) -> Placement:
        """The draft's GPU."""
        return Placement(gpu=self.gpu, has_graphs=self.has_graphs)

    def traces(self, agreement: float) -> list[Trace]:
        """Returns the traces that `hippo simulate --acceptance` draws for the pair."""
        return drawn_traces(
            agreement=agreement, num_traces=12, num_tokens=NUM_NEW_TOKENS, burstiness=0.5,
            num_prompt_tokens=self.num_prompt_tokens, num_draft_prompt_tokens=self.num_draft_tokens,
        )  # fmt: skip

    def _helper_layers(self) -> int:
        """Returns the layers for a helper on the draft's GPU; 0 for a target on several GPUs."""
        num_tokens, cached = self.num_prompt_tokens, self.num_draft_tokens + NUM_NEW_TOKENS
        draft = memory_of(self.draft, num_tokens=num_tokens, num_slots=1, cache_tokens=cached)
        helper = helper_memory(self.target, draft, self.gpu.device_bytes, num_tokens)
        return helper["num_layers"] if self.num_target_gpus == 1 else 0

    def machine(self) -> Machine:
        """Returns the pair's times. Raises InvalidRequestError if it does not fit into memory."""
        target, draft = self.target_place, self.draft_place
        target.check_fits(self.target, self.num_prompt_tokens + NUM_NEW_TOKENS)
        draft.check_fits(self.draft, self.num_draft_tokens + NUM_NEW_TOKENS)
        prefill_ms = target.prefill_ms(self.target, self.num_prompt_tokens)
        num_layers, num_tokens = self._helper_layers(), self.num_prompt_tokens
        tower_ms = target.tower_ms(self.target, self.num_visual_tokens)
        helper_ms, helped_ms = target.helped_prefill_ms(
            self.target, num_layers, num_tokens, tower_ms
        )
        return Machine(
            name=f"{self.title} on {draft.num_gpus} + {target.num_gpus} {self.gpu.name}",
            target=RooflineTime(target, self.target),
            draft=RooflineTime(draft, self.draft),
            target_prefill_ms=prefill_ms,
            draft_prefill_ms=draft.prefill_ms(self.draft, self.num_draft_tokens),
            selection_ms=_SCORED_SHARE * prefill_ms,
            tower_ms=tower_ms,
            helper_layers=num_layers,
            helped_prefill_ms=helped_ms,
            helped_selection_ms=helper_ms,
            **_MESSAGES,
            sources=(
                f"step times from bytes over bandwidth: {self.gpu.bandwidth_gbs:g} GB/s x "
                f"{target.bandwidth_share:g}, {target.num_gpus} GPUs share the target, "
                f"{target.layer_us:g} us a layer, {target.sum_us:g} us a sum, {self._form}; at "
                f"least {target.launch_us:g} us for each operation of steps without CUDA graphs",
                f"{self.num_visual_tokens:,} visual tokens, {self.ratio:.0%} of them pruned for "
                "the draft",
            ),
        )


def _pair(
    name: str, family: str, draft: str, target: str, *, num_target_gpus: int = 1,
    layer_bits: float | None = None,
) -> ModelPair:  # fmt: skip
    title = "Qwen2.5-VL" if family is _QWEN else "LLaVA-OneVision"
    form = "" if layer_bits is None else " in nf4"
    return ModelPair(
        name=name,
        title=f"{title} {draft.upper()} / {target.upper()}{form}",
        draft=find_shape(family.format(draft)),
        target=find_shape(family.format(target), layer_bits=layer_bits),
        num_target_gpus=num_target_gpus,
    )


KNOWN_PAIRS = (
    ("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2-VL-2B-Instruct"),
    ("Qwen/Qwen2-VL-72B-Instruct", "Qwen/Qwen2-VL-7B-Instruct"),
    ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"),
    ("Qwen/Qwen2.5-VL-32B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ("Qwen/Qwen2.5-VL-72B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    ("Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"),
    ("llava-hf/llava-onevision-qwen2-72b-ov-hf", "llava-hf/llava-onevision-qwen2-7b-ov-hf"),
    ("OpenGVLab/InternVL3_5-8B-HF", "OpenGVLab/InternVL3_5-1B-HF"),
    ("OpenGVLab/InternVL3_5-38B-HF", "OpenGVLab/InternVL3_5-2B-HF"),
)
"""Targets and drafts of the families, for ``hippo sizes --all``."""

PAIRS = {
    pair.name: pair
    for pair in (
        _pair("qwen-7b-72b", _QWEN, "7B", "72B", num_target_gpus=2),
        _pair("qwen-7b-72b-nf4", _QWEN, "7B", "72B", layer_bits=4.25),
        _pair("qwen-3b-72b-nf4", _QWEN, "3B", "72B", layer_bits=4.25),
        _pair("qwen-7b-32b", _QWEN, "7B", "32B"),
        _pair("qwen-3b-32b", _QWEN, "3B", "32B"),
        _pair("qwen-3b-32b-nf4", _QWEN, "3B", "32B", layer_bits=4.25),
        _pair("qwen-3b-7b", _QWEN, "3B", "7B"),
        _pair("llava-0.5b-7b", _LLAVA, "0.5b", "7b"),
        _pair("llava-7b-72b", _LLAVA, "7b", "72b", num_target_gpus=2),
    )
}


def find_pair(name: str) -> ModelPair:
    """Returns a pair by name. Raises InvalidRequestError, with all names, if it is unknown."""
    if name not in PAIRS:
        raise InvalidRequestError(f"unknown pair {name!r}; choose one of {', '.join(PAIRS)}")
    return PAIRS[name]
