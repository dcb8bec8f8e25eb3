"""Whether the draft was right, token by token, whichever side's token came first.

The gateway sees what the draft says and what the target settles, so each token of a run is a trial
that costs nothing, whether or not the target ever had a row for it. A run ends with its first
wrong token: what was drafted behind that says nothing.
"""

from __future__ import annotations

from hippo.types import Block, Verdict


class Trials:
    """Compares one sequence's draft tokens with its settled ones, each index of a run once."""

    def __init__(self) -> None:
        self._settled: list[int] = []
        self._run: dict[int, int] = {}  # draft tokens by index, not yet compared
        self._end = 0  # all before this index was compared, or never drafted
        self._epoch = 0
        self._is_broken = False  # until the next epoch

    def is_stale(self, block: Block) -> bool:
        """Whether it belongs to a run that has ended."""
        return block.epoch < self._epoch or (self._is_broken and block.epoch == self._epoch)

    def add_block(self, block: Block) -> list[bool]:
        """What it tells about tokens that are settled already: is each right? At most the last
        is wrong."""
        self._enter(block.epoch)
        if self._is_broken:
            return []
        for offset, token_id in enumerate(block.token_ids):
            if block.start_index + offset >= self._end:
                self._run[block.start_index + offset] = token_id
        return self._compare()

    def add_verdict(self, verdict: Verdict) -> list[bool]:
        """What it tells about tokens that were drafted before."""
        self._settled.extend(verdict.token_ids)
        outcomes = self._compare()
        self._enter(verdict.epoch)
        return outcomes

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._run.clear()
            self._is_broken = False

    def _compare(self) -> list[bool]:
        outcomes = []
        for index in sorted(self._run):
            if index >= len(self._settled):
                break
            is_right = self._run.pop(index) == self._settled[index]
            self._end = index + 1
            outcomes.append(is_right)
            if not is_right:
                self._run.clear()
                self._is_broken = True
                break
        return outcomes
