"""What the draft would go on with if the target chose the draft's second choice of a token.

When the draft has drafted its run as far as it may, it drafts what follows its second choices, and
sends these *branches* ahead (docs/algorithms.md, "Branches"). Drafting them takes no time from the
run.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hippo.types import Branch

# A branch is not begun or extended when it is needed more rarely than this: in the simulator more
# branches gain nothing, and each is a message to all three services.
_LEAST_CHANCE = 0.1


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft's choices for one token.

    ``second_share`` is the probability of ``second_id`` by the draft's distribution, as if the
    token were one of the two; at most 0.5. ``choices`` are the first choices at all sharpnesses,
    at a temperature above 0.
    """

    token_id: int
    second_id: int = 0
    second_share: float = 0.0
    choices: tuple[int, ...] = ()


@dataclass(slots=True)
class DraftBranch:
    """A branch from the completion index ``start`` on, which the draft may extend."""

    start: int
    ids: list[int]  # the second choice, then drafted tokens
    proposals: list[Proposal] = field(default_factory=list)  # proposals of the drafted tokens
    num_sent: int = 0  # drafted tokens that were sent

    @property
    def num_drafted(self) -> int:
        return len(self.proposals)

    @property
    def chance(self) -> float:
        """Probability that all drafted tokens are right if the second choice is."""
        return math.prod(1 - proposal.second_share for proposal in self.proposals)

    def append(self, proposal: Proposal) -> None:
        self.ids.append(proposal.token_id)
        self.proposals.append(proposal)


class Branches:
    """The branches of a draft's present run; a branch never goes beyond an end token."""

    def __init__(self, end_token_ids: Collection[int]) -> None:
        self._end_token_ids = end_token_ids
        self._branches: dict[int, DraftBranch] = {}  # by start, with drafted tokens

    @property
    def num_drafted(self) -> int:
        return sum(each.num_drafted for each in self._branches.values())

    @property
    def num_unsent(self) -> int:
        return sum(each.num_drafted - each.num_sent for each in self._branches.values())

    def likeliest(self, proposals: Mapping[int, Proposal], *, end: int) -> DraftBranch | None:
        """Returns the branch whose next token is most probably needed, which may be a new one; None
        if each is improbable or complete.

        ``proposals`` belong to the run's drafted tokens in the order of their indices, and no
        token has the index ``end``.
        """
        reach, best, found = 1.0, _LEAST_CHANCE, None
        for index, proposal in proposals.items():
            chance = reach * proposal.second_share
            if chance > best:
                branch = self._branches.get(index) or DraftBranch(index, [proposal.second_id])
                chance *= branch.chance
                has_room = index + len(branch.ids) < end
                if chance > best and has_room and branch.ids[-1] not in self._end_token_ids:
                    best, found = chance, branch
            reach *= 1 - proposal.second_share
        return found

    def keep(self, branch: DraftBranch) -> None:
        self._branches[branch.start] = branch

    def take_unsent(self) -> tuple[Branch, ...]:
        """Returns the branches that have unsent tokens, whole; they count as sent."""
        unsent = [each for each in self._branches.values() if each.num_drafted > each.num_sent]
        for each in unsent:
            each.num_sent = each.num_drafted
        return tuple(Branch(each.start, tuple(each.ids)) for each in unsent)

    def forget_sent(self) -> None:
        for branch in self._branches.values():
            branch.num_sent = 0

    def settle(self, num_settled: int) -> None:
        """Drops the branches of indices below ``num_settled``."""
        kept = {start: each for start, each in self._branches.items() if start >= num_settled}
        self._branches = kept

    def take(self, start: int) -> DraftBranch | None:
        """Returns the branch of an index and drops all branches, whose run has ended."""
        branch = self._branches.get(start)
        self._branches.clear()
        return branch
