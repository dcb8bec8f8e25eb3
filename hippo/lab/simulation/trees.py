"""A sequence's candidates as one tree, and what a policy knows about their chances.

A node's chance is what the draft's probability of that rank has meant so far, as the verdicts told
(``Calibration``); nothing here knows the target's next token. ``wrong`` of a node serves the
recorded draft alone, to say what the real one would have said.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hippo.speculation.estimates import Acceptance

_EDGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_PRIOR = 4.0  # weight of the draft's own probability, in outcomes
LEAST = 0.003  # chance of a token that the draft did not name
_MEMORY = 0.98  # weight of a forward in the speed, relative to the next

_LONGEST_MATCH, _MOST_GUESSED, _MOST_BROKEN = 3, 4, 12  # as in the services


@dataclass(eq=False, slots=True)
class Node:
    """A token at a completion index behind its parent's path."""

    token: int
    index: int
    parent: "Node | None"
    chance: float  # that the target takes it if it took the parent
    wrong: tuple[int, ...] = ()  # the path's tokens from the first wrong one on
    bucket: tuple[int, int] | None = None  # in the calibration; None: not a choice of the draft
    children: list["Node"] = field(default_factory=list)
    grafted: int = 0  # 1: the first token taken over from a broken run; 2: a later one
    settled: "Node | None" = None  # the target's token behind it, if it is settled
    is_fed: bool = False  # the draft has its row, or will when its step ends
    is_expanded: bool = False  # the draft has named its children
    ready_ns: float = 0.0  # when the target knows it

    def child(self, token: int) -> "Node | None":
        """Returns the child with the token."""
        return next((each for each in self.children if each.token == token), None)

    def path(self) -> list[int]:
        """Returns the tokens from index 0 to this node's."""
        ids, node = [], self
        while node.index >= 0:
            ids.append(node.token)
            assert node.parent is not None
            node = node.parent
        return ids[::-1]


class Calibration:
    """What the draft's probabilities mean, by rank and by bucket of probability."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], list[float]] = {}

    def bucket(self, rank: int, probability: float) -> tuple[int, int]:
        """Returns the key of a choice."""
        return rank, bisect.bisect_left(_EDGES, probability)

    def chance(self, bucket: tuple[int, int], probability: float) -> float:
        """Returns the share of such choices that were right; at first the probability itself."""
        right, count = self._sums.get(bucket, (0.0, 0.0))
        return max((right + _PRIOR * probability) / (count + _PRIOR), LEAST)

    def observe(self, bucket: tuple[int, int], is_right: bool) -> None:
        """Counts an outcome."""
        sums = self._sums.setdefault(bucket, [0.0, 0.0])
        sums[0] += is_right
        sums[1] += 1


@dataclass(slots=True)
class Experience:
    """What a pair's sequences have learned, from one answer to the next."""

    calibration: Calibration = field(default_factory=Calibration)
    covered: Acceptance = field(default_factory=Acceptance)  # any of a node's children is right
    broken_first: Acceptance = field(default_factory=Acceptance)
    broken_later: Acceptance = field(default_factory=Acceptance)
    levels: float = 1.0  # by which a draft step extends its likeliest leaf, mean
    tokens: float = 0.0
    time_ns: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a nanosecond of late."""
        return self.tokens / self.time_ns if self.time_ns else 0.0

    def observe_forward(self, num_tokens: int, time_ns: float) -> None:
        """Counts a forward with the time since the one before it."""
        self.tokens = _MEMORY * self.tokens + num_tokens
        self.time_ns = _MEMORY * self.time_ns + time_ns


def best_first(
    root: Node, wanted: Callable[[Node], bool] = lambda node: True
) -> Iterator[tuple[float, Node]]:
    """Yields the nodes below ``root`` with the chances of their paths, the highest first; below a
    node that is not ``wanted``, none."""
    order = itertools.count()
    heap = [(-each.chance, next(order), each) for each in root.children if wanted(each)]
    heapq.heapify(heap)
    while heap:
        reach, _, node = heapq.heappop(heap)
        yield -reach, node
        for each in node.children:
            if wanted(each):
                heapq.heappush(heap, (reach * each.chance, next(order), each))


def choose_nodes(
    ranked: Sequence[tuple[float, Node]], cost_ns: Callable[[int], float], speed: float
) -> int:
    """Returns how many of the ranked nodes a forward best verifies: its tokens less what its time
    is worth at the ``speed``, in tokens a nanosecond, are most."""
    best, value, tokens = 0, 1 - speed * cost_ns(1), 1.0
    for num, (reach, _) in enumerate(ranked, 1):
        tokens += reach
        if (found := tokens - speed * cost_ns(num + 1)) > value:
            best, value = num, found
    return best


def graft(root: Node, dead: Node, output: Sequence[int], experience: Experience) -> None:
    """Hangs what the draft had behind a wrong token under the settled token at its index."""
    node, chance = root, experience.broken_first.rate
    for _ in range(_MOST_BROKEN):
        if not dead.children:
            return
        dead = max(dead.children, key=lambda each: each.chance)
        wrong = node.wrong
        if wrong or node.index + 1 >= len(output) or output[node.index + 1] != dead.token:
            wrong = (*wrong, dead.token)
        added = Node(
            dead.token, node.index + 1, node, chance, wrong,
            grafted=1 + (node is not root), ready_ns=dead.ready_ns,
        )  # fmt: skip
        node.children.append(added)
        node, chance = added, experience.broken_later.rate


def continuation(ids: Sequence[int]) -> list[int]:
    """Returns what followed the last occurrence of the last tokens, as
    :class:`hippo.speculation.continuations.Continuations` does."""
    for length in range(min(_LONGEST_MATCH, len(ids) - 1), 0, -1):
        suffix = list(ids[-length:])
        for end in range(len(ids) - 1, length - 1, -1):
            if list(ids[end - length : end]) == suffix:
                return list(ids[end : end + _MOST_GUESSED])
    return []
