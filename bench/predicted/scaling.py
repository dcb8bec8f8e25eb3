"""The table of GPUs: which pair fits, how much video, and the predicted speed."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hippo.catalog.sizes import RESERVED_BYTES, USED_SHARE, Memory, memory_of
from hippo.lab.simulation.hardware import GPUS, Gpu
from hippo.lab.simulation.machine import Machine
from hippo.lab.simulation.pairs import NUM_NEW_TOKENS, ModelPair, find_pair
from hippo.lab.simulation.replay import GAMMAS, PolicyChoice, Totals, replay_all
from hippo.media.resizing import smart_resize
from hippo.models.families.qwen_prompt import FRAME_TOKENS, MAX_VIDEO_TOKENS
from hippo.models.interface.context import choose_context, pruned_cache_tokens, visual_limit

GPU_NAMES = ("a100-40", "a100", "h100", "h200")
PAIR_NAMES = (
    *("qwen-7b-72b", "qwen-7b-72b-nf4", "qwen-3b-72b-nf4", "qwen-7b-32b", "qwen-3b-32b"),
    *("qwen-3b-32b-nf4", "qwen-3b-7b", "llava-0.5b-7b"),
)
AGREEMENTS = (0.81, 0.87)
HEAD = (
    *("GPU", "pair", "GPUs", "context", "1080p, s", "alone, tokens/s"),
    *(f"a = {rate:g}: tokens/s, decode, end to end" for rate in AGREEMENTS),
)
_VIDEO = (1080, 1920)  # height and width of a telephone's video
_SECONDS = 30  # length of the video for the speeds
_LIMIT = 128_000  # tokens that the checkpoints of Qwen2.5-VL allow
_LLAVA_LIMIT = 32_768
_LLAVA_TOKENS = 32 * 196 + 1  # for any video: 32 frames
_MOST_TARGET_GPUS = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on GPUs; ``num_target_gpus`` 0: draft and target share one."""

    num_target_gpus: int
    context: int

    @property
    def gpus(self) -> str:
        """The GPUs of draft and target."""
        return f"1 + {self.num_target_gpus}" if self.num_target_gpus else "1 for both"


def tokens_per_second() -> int:
    """Returns the visual tokens of a second of 1080p with Qwen2.5-VL's default sampling: one grid
    for two frames."""
    least, most = (count * 28**2 for count in FRAME_TOKENS)
    height, width = smart_resize(*_VIDEO, 28, least, most)
    return height * width // 28**2


def scaling_rows(
    gpus: Sequence[str] = GPU_NAMES, pairs: Sequence[str] = PAIR_NAMES
) -> Iterator[tuple[str, ...]]:
    """Yields the rows below ``HEAD``: of each pair those GPUs on which it fits, and one row without
    figures if it does not."""
    for gpu in (GPUS[name] for name in gpus):
        for pair in (find_pair(name) for name in pairs):
            fits = [fit for fit in (_on_one(pair, gpu), _on_two_or_more(pair, gpu)) if fit]
            for fit in fits:
                yield (gpu.name, pair.title, *_cells(pair, gpu, fit))
            if not fits:
                yield (gpu.name, pair.title, "does not fit", *["-"] * (len(HEAD) - 3))


def _cells(pair: ModelPair, gpu: Gpu, fit: Fit) -> Iterator[str]:
    is_llava = _is_llava(pair)
    most = min(visual_limit(fit.context, NUM_NEW_TOKENS), MAX_VIDEO_TOKENS)
    num_tokens = _LLAVA_TOKENS if is_llava else min(most, _SECONDS * tokens_per_second())
    placed = dataclasses.replace(
        pair, gpu=gpu, num_target_gpus=max(fit.num_target_gpus, 1), num_visual_tokens=num_tokens
    )
    yield fit.gpus
    yield f"{fit.context:,}"
    yield "any (32 frames)" if is_llava else f"{most // tokens_per_second():,}"
    machine = placed.machine()
    if not fit.num_target_gpus:  # the draft's prefill waits for the target's
        machine = dataclasses.replace(machine, selection_ms=machine.target_prefill_ms)
    alone = replay_all(PolicyChoice("off"), placed.traces(AGREEMENTS[0]), machine)
    yield f"{1e3 / alone.ms_per_token:.1f}"
    for rate in AGREEMENTS:
        traces = placed.traces(rate)
        policy = PolicyChoice("adaptive")
        if not fit.num_target_gpus:
            policy = PolicyChoice("serial", _taking_turns(machine, placed, rate))
        yield _speeds(alone, replay_all(policy, traces, machine))


def _taking_turns(machine: Machine, pair: ModelPair, rate: float) -> int:
    """Returns the draft length of the highest speed if one model computes at a time; docs/
    algorithms.md, "One GPU"."""
    draft_ms = machine.draft.ms(1, pair.num_draft_tokens)

    def ms_per_token(gamma: int) -> float:
        verified_ms = machine.target.ms(gamma + 1, pair.num_prompt_tokens)
        return (verified_ms + gamma * draft_ms) * (1 - rate) / (1 - rate ** (gamma + 1))

    return min(GAMMAS, key=ms_per_token)


def _speeds(alone: Totals, totals: Totals) -> str:
    decode = alone.decode_ns / totals.decode_ns
    return (
        f"{1e3 / totals.ms_per_token:.0f}, {decode:.2f}×, {alone.total_ns / totals.total_ns:.2f}×"
    )


def _on_two_or_more(pair: ModelPair, gpu: Gpu) -> Fit | None:
    """Returns the fewest GPUs for the target beside one for the draft, and the longest context."""
    for count in range(1, _MOST_TARGET_GPUS + 1):
        if not pair.target.can_divide(count):
            continue
        context = choose_context(
            _limit(pair),
            1,
            lambda tokens, slots, count=count: all(  # type: ignore[misc]
                side.fits(gpu.device_bytes) for side in _memories(pair, tokens, slots, count)
            ),
        )
        if context >= _least(pair):
            return Fit(count, context)
    return None


def _on_one(pair: ModelPair, gpu: Gpu) -> Fit | None:
    """Returns the longest context of both models on one GPU, each by the rule of Memory.fits."""

    def fits(tokens: int, slots: int) -> bool:
        both = _memories(pair, tokens, slots)
        left = gpu.device_bytes - sum(RESERVED_BYTES + each.weights for each in both)
        return sum(each.total - each.weights for each in both) <= USED_SHARE * left

    context = choose_context(_limit(pair), 1, fits)
    return Fit(0, context) if context >= _least(pair) else None


def _memories(
    pair: ModelPair, tokens: int, slots: int, num_target_gpus: int = 1
) -> tuple[Memory, Memory]:
    """Returns what target and draft take, as `hippo sizes` tells it."""
    return (
        memory_of(pair.target, num_tokens=tokens, num_slots=slots, num_devices=num_target_gpus),
        memory_of(
            pair.draft, num_tokens=tokens, num_slots=slots, cache_tokens=pruned_cache_tokens(tokens)
        ),
    )


def _is_llava(pair: ModelPair) -> bool:
    return pair.title.startswith("LLaVA")


def _limit(pair: ModelPair) -> int:
    return _LLAVA_LIMIT if _is_llava(pair) else _LIMIT


def _least(pair: ModelPair) -> int:
    """Returns the context of the shortest useful video: five seconds, or LLaVA's 32 frames."""
    visual = _LLAVA_TOKENS if _is_llava(pair) else 5 * tokens_per_second()
    return visual * 4 // 3
