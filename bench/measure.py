"""Runs every system on every clip, interleaved, and keeps one record each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.client import Answer, ask, video_url
from bench.clips import Clip
from bench.systems import TARGET_ONLY, System


@dataclass(frozen=True, slots=True)
class Record:
    """One system's answer about one clip, beside target-only's on the same clip."""

    clip: str
    system: str
    temperature: float
    answer: Answer
    baseline_decode_s: float
    baseline_end_to_end_s: float
    baseline_ids: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the answer is target-only's, token for token."""
        return self.answer.token_ids == self.baseline_ids

    @property
    def decode_speedup(self) -> float:
        """First token to last, per token, against target-only."""
        return self.baseline_decode_s / self.answer.decode_s

    @property
    def end_to_end_speedup(self) -> float:
        """Request to last token, against target-only."""
        return self.baseline_end_to_end_s / self.answer.end_to_end_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "clip": self.clip,
            "system": self.system,
            "temperature": self.temperature,
            "num_tokens": self.answer.num_tokens,
            "ttft_s": self.answer.ttft_s,
            "decode_s": self.answer.decode_s,
            "end_to_end_s": self.answer.end_to_end_s,
            "decode_speedup": self.decode_speedup,
            "end_to_end_speedup": self.end_to_end_speedup,
            "is_equal": self.is_equal,
            "figures": dict(self.answer.figures),
        }


def measure(
    base_url: str,
    clips: Sequence[Clip],
    systems: Sequence[System],
    *,
    temperature: float = 0.0,
    max_tokens: int = 256,
    num_repeats: int = 1,
    has_timeline: bool = False,
) -> Iterator[Record]:
    """Yields records clip by clip.

    Target-only runs before and after the other systems on each clip; the baseline is the mean of
    the two, and their ratio (system "target-only", twice a clip) shows the drift of the machine.
    With ``num_repeats`` each of these is the run of median decode time among that many;
    ``has_timeline`` keeps every verdict and block in its figures.
    """
    with httpx.Client(base_url=base_url, timeout=600) as client:
        warm_up = video_url(clips[0].path)
        for system in systems:
            ask(client, warm_up, clips[0].question, speculative=system.speculative, max_tokens=24)
        for number, clip in enumerate(clips):
            video = video_url(clip.path)

            def run(
                system: System, video: str = video, clip: Clip = clip, seed: int = number
            ) -> Answer:
                answers = [
                    ask(
                        client,
                        video,
                        clip.question,
                        speculative=system.speculative,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        seed=seed,
                        is_video_first=clip.is_video_first,
                        has_timeline=has_timeline,
                    )
                    for _ in range(num_repeats)
                ]
                return _typical(answers)

            off = System(TARGET_ONLY, {"policy": "off"})
            others = [system for system in systems if system.name != TARGET_ONLY]
            shift = number % len(others) if others else 0
            before = run(off)
            answers = [(system, run(system)) for system in others[shift:] + others[:shift]]
            after = run(off)
            decode = (before.decode_s + after.decode_s) / 2
            end_to_end = (before.end_to_end_s + after.end_to_end_s) / 2
            for system, answer in [(off, before), (off, after), *answers]:
                yield Record(
                    clip=clip.path.name,
                    system=system.name,
                    temperature=temperature,
                    answer=answer,
                    baseline_decode_s=decode,
                    baseline_end_to_end_s=end_to_end,
                    baseline_ids=before.token_ids,
                )


def _typical(answers: Sequence[Answer]) -> Answer:
    """The run of median decode time; but one that differs from the first, if there is one."""
    for answer in answers:
        if answer.token_ids != answers[0].token_ids:
            return answer
    return sorted(answers, key=lambda answer: answer.decode_s)[len(answers) // 2]
