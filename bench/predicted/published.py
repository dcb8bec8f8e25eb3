"""The table of published speedups beside those that the simulator predicts for the same pairs."""

from collections.abc import Iterator
from dataclasses import dataclass

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import ModelShape
from hippo.lab.simulation.hardware import GPUS, Placement, RooflineTime
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.pairs import NUM_NEW_TOKENS
from hippo.lab.simulation.replay import PolicyChoice, replay_all
from hippo.lab.simulation.traces import agreement_of_run_length, drawn_traces
from hippo.speculation.policies import MAX_DRAFT_TOKENS

HEAD = (
    *("system", "pair", "M", "run length", "published", "T / d", "vpsd (γ)", "over published"),
    *("adaptive", "over published"),
)
_QWEN, _LLAVA = "Qwen/Qwen2.5-VL-{}-Instruct", "llava-hf/llava-onevision-qwen2-{}-ov-hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetting:
    """A pair on the machine of a publication; each model has its context."""

    system: str
    pair: str
    draft: ModelShape
    target: ModelShape
    draft_place: Placement
    target_place: Placement
    context: int
    draft_context: int
    counts_corrected: bool  # whether the publication's M counts the corrected token

    def machine(self) -> Machine:
        """Returns the step times on this machine, without messages between services: in all three
        systems both models are of one process group, whose messages take microseconds."""
        return Machine(
            name=self.pair,
            target=RooflineTime(self.target_place, self.target),
            draft=RooflineTime(self.draft_place, self.draft),
        )


def _settings() -> tuple[tuple[PublishedSetting, tuple[tuple[float, float], ...]], ...]:
    """Returns the settings, each with pairs of M (mean accepted tokens) and speedup."""
    h200, l40s = GPUS["h200"], GPUS["l40s"]
    # Text prompts of some hundred tokens. The language model of Qwen2-VL-2B has the shape of
    # Qwen2.5-1.5B, and the language model of Qwen2.5-VL-72B has the shape of Qwen2.5-72B.
    nano = PublishedSetting(
        system="nano-PEARL, 3 H200", pair="Qwen2.5 1.5B / 72B", context=1000, draft_context=1000,
        draft=find_shape("Qwen/Qwen2-VL-2B-Instruct"), draft_place=Placement(gpu=h200),
        target=find_shape(_QWEN.format("72B")), target_place=Placement(gpu=h200, num_gpus=2),
        counts_corrected=True,
    )  # fmt: skip

    def parallel(pair: str, family: str, draft: str, target: str) -> PublishedSetting:
        # Layers are spread over the GPUs and run one after another, at the speed of one GPU.
        place = Placement(gpu=l40s, has_graphs=False)
        return PublishedSetting(
            system="ParallelVLM, 8 L40S", pair=pair, context=24_000, draft_context=2_400,
            draft=find_shape(family.format(draft)), draft_place=place,
            target=find_shape(family.format(target)), target_place=place, counts_corrected=False,
        )  # fmt: skip

    return (
        (nano, ((3.85, 2.08), (7.34, 3.16), (9.65, 3.76), (15.08, 4.52))),
        (parallel("LLaVA-OneVision 7B / 72B", _LLAVA, "7b", "72b"), ((6.8, 3.36),)),
        (parallel("LLaVA-OneVision 0.5B / 7B", _LLAVA, "0.5b", "7b"), ((8.3, 2.11),)),
        (parallel("Qwen2.5-VL 7B / 32B", _QWEN, "7B", "32B"), ((4.3, 2.42),)),
    )


def published_rows() -> Iterator[tuple[str, ...]]:
    """Yields the rows below ``HEAD``."""
    for setting, cells in _settings():
        machine = setting.machine()
        for accepted, speedup in cells:
            yield _row(setting, machine, accepted, speedup)


def _row(
    setting: PublishedSetting, machine: Machine, accepted: float, speedup: float
) -> tuple[str, ...]:
    ratio = machine.target.ms(1, setting.context) / machine.draft.ms(1, setting.draft_context)
    gamma = min(max(round(ratio), 1), MAX_DRAFT_TOKENS)
    run_length = accepted + (not setting.counts_corrected)
    traces = drawn_traces(
        agreement=agreement_of_run_length(run_length),
        num_traces=24,
        num_tokens=NUM_NEW_TOKENS,
        num_prompt_tokens=setting.context,
        num_draft_prompt_tokens=setting.draft_context,
    )
    policies = (PolicyChoice("off"), PolicyChoice("vpsd", gamma), PolicyChoice("adaptive"))
    alone, vpsd, adaptive = (replay_all(each, traces, machine).decode_ns for each in policies)
    return (
        *(setting.system, setting.pair, f"{accepted:g}", f"{run_length:g}", f"{speedup:.2f}"),
        f"{ratio:.1f}",
        *(f"{alone / vpsd:.2f} ({gamma})", f"{alone / vpsd / speedup:.2f}"),
        *(f"{alone / adaptive:.2f}", f"{alone / adaptive / speedup:.2f}"),
    )


def target_step_ms() -> float:
    """Returns the computed target-only step of nano-PEARL's machine; 43.6 tokens/s were published
    for it."""
    setting = _settings()[0][0]
    return setting.machine().target.ms(1, setting.context)
