"""Teacher-forced agreement: the draft's greedy tokens along the target's output."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from bench.drafts.traces import ClipTrace, SampleTrace
from bench.pruning.choices import Choice
from hippo.client.json_lines import JsonLines
from hippo.models.interface.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.interface.content import compacted


class AgreementCache:
    """Agreement of the draft by sample and kept tokens, in an append-only file.

    A repeated or resumed run, or another choice that keeps the same tokens, uses its entries.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, str] = {}
        self._file = JsonLines(path, self._take, kind="trace of agreement")

    def get_trace(self, key: str) -> str | None:
        """Returns the agreement trace ("1" where the draft agrees, else "0"), or None."""
        return self._known.get(key)

    def put_trace(self, key: str, agrees: str) -> None:
        """Stores a trace."""
        self._known[key] = agrees
        self._file.append({"key": key, "agrees": agrees})

    def _take(self, number: int, line: bytes) -> None:
        entry = json.loads(line)
        self._known[entry["key"]] = entry["agrees"]


class DraftRunner:
    """Runs one draft over traces, in slot 0 of the model."""

    def __init__(self, draft: VideoLanguageModel, cache: AgreementCache) -> None:
        self._draft = draft
        self._cache = cache

    def agreement(
        self, clip: ClipTrace, trace: SampleTrace, choice: Choice, kept: torch.Tensor
    ) -> str:
        """Returns "1" for each output token that equals the draft's greedy token, else "0"."""
        digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:16]
        positions = "compacted" if choice.is_compacted else "original"
        key = f"{trace.sample.name} {digest} {positions}"
        known = self._cache.get_trace(key)
        if known is None:
            said = self._greedy_along(clip, trace, kept, choice.is_compacted)
            pairs = zip(said, trace.output_ids, strict=True)
            known = "".join("1" if ours == theirs else "0" for ours, theirs in pairs)
            self._cache.put_trace(key, known)
        return known

    def _greedy_along(
        self, clip: ClipTrace, trace: SampleTrace, kept: torch.Tensor, is_compacted: bool
    ) -> list[int]:
        prompt = compacted(trace.prompt, kept) if is_compacted else trace.prompt
        *_, first = self._draft.prefill(0, prompt, clip.draft_features, kept)
        assert first is not None
        said = [int(first.argmax())]
        if len(trace.output_ids) > 1:
            rows = SequenceRows(0, 0, trace.output_ids[:-1])
            said += self._draft.forward(StepPlan((rows,))).argmax(-1).tolist()
        return said
