"""Replays a recorded answer with a tree of candidates instead of a chain, in virtual time.

The two devices, the gateway and the messages cost what they cost in :mod:`.simulator`. The draft
extends the likeliest nodes, several in one forward; the target verifies the likeliest nodes, as
many as its rows' time is worth at the present speed. On two devices both go on at once, and what
the draft names reaches the target with each of its steps. On one device they take turns: the draft
extends the tree while a step gains more tokens than its time is worth, then the target verifies.
Moving the accepted rows together in the cache, and the masks, take no time here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hippo.lab.simulation.devices import Clock, Costs, Device, Outcome
from hippo.lab.simulation.recorded import Recording
from hippo.lab.simulation.trees import (
    LEAST,
    Experience,
    Node,
    best_first,
    choose_nodes,
    continuation,
    graft,
)

_NEW = 0.05  # weight of a draft step in the mean of its levels


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Limits of a tree: nodes of a target forward, leaves that a draft forward extends, choices
    that become nodes (1: a chain), nodes that the draft may be ahead. Without ``has_broken_runs``
    a rejected path is forgotten."""

    most_nodes: int
    most_leaves: int = 8
    num_choices: int = 3
    most_ahead: int = 256
    least_reach: float = 0.01  # no node is extended whose path is rarer
    takes_turns: bool = False
    has_broken_runs: bool = True
    has_guesses: bool = True
    patience: float = 0.5  # weight of what waiting gains


class TreeReplay(Clock):
    """One answer, from both prefills to its end; ``run`` can be called once."""

    def __init__(
        self, recording: Recording, costs: Costs, shape: TreeShape, experience: Experience
    ) -> None:
        super().__init__()
        self._recording, self._costs, self._shape = recording, costs, shape
        self._known = experience
        self._target, self._draft = Device(self), Device(self)
        self._start = Node(-1, -1, None, 1.0, is_fed=True)
        self._root = self._start  # of the target: the last settled token
        self._seen = self._start  # of the draft: the last settled token that it knows of
        self._ids: list[int] = []
        self._verified_ns = 0.0
        self._has_begun = False  # the draft's prefill is over
        self._is_turn = False  # of the target, if they take turns
        self._wakes_at = 0.0  # when the target's wait ends
        self.outcome = Outcome()
        # Of each forward the begin, the number of tokens settled before, and the nodes' tokens.
        self.forwards: list[tuple[float, int, tuple[int, ...]]] = []

    def run(self) -> Outcome:
        """Runs to the end of the answer."""
        prefilled = self._costs.draft_prefill_delay_ns + self._costs.draft_prefill_ns
        self.call_at(prefilled, self._begin_draft)
        self.call_at(self._costs.target_prefill_ns, partial(self._settle, [], self._start))
        while not self._is_finished:
            self.run_next_event()
        self.outcome.output_ids = self._ids
        return self.outcome

    @property
    def _is_finished(self) -> bool:
        return len(self._ids) == len(self._recording.output)

    # The target.

    def _drive_target(self) -> None:
        if self._target.is_busy or self._is_finished or not self._ids:
            return
        if self._shape.takes_turns and not self._is_turn:
            return
        ranked = []
        for each in best_first(self._root, lambda node: node.ready_ns <= self.now):
            ranked.append(each)
            if len(ranked) == self._shape.most_nodes:
                break
        if not self._shape.takes_turns and self._should_wait(ranked):
            return
        num = choose_nodes(ranked, self._forward_ns, self._speed)
        nodes = [node for _, node in ranked[:num]]
        tokens = tuple(node.token for _, node in ranked[:num])
        self.forwards.append((self.now, len(self._ids), tokens))
        self._target.run(self._forward_ns(num + 1), partial(self._finish_target, nodes))

    def _should_wait(self, ranked: list[tuple[float, Node]]) -> bool:
        """Whether the draft's next step is worth more than the time until it is here; the target
        waits for a forward's time at most."""
        until = self._verified_ns + self._forward_ns(1)
        if self.now >= until:
            return False
        gain = max((reach for reach, node in ranked if not node.is_expanded), default=0.0)
        if not self._root.is_expanded:
            gain = 1.0 - max((each.chance for each in self._root.children), default=0.0)
        leg = self._costs.leg_ns()
        delay = 2 * leg + self._draft_ns(1)
        if self._seen is not self._root:
            delay += max(2 * leg - (self.now - self._verified_ns), 0.0)
        if self._shape.patience * self._known.covered.rate * gain <= self._speed * delay:
            return False
        if self._wakes_at != until:
            self._wakes_at = until
            self.call_at(until, self._drive_target)
        return True

    def _finish_target(self, nodes: list[Node]) -> None:
        self._is_turn = False
        chosen, node = set(map(id, nodes)), self._root
        accepted: list[Node] = []
        output = self._recording.output
        while len(self._ids) + len(accepted) + 1 < len(output):
            child = node.child(output[node.index + 1])
            if child is None or id(child) not in chosen:
                break
            accepted.append(child)
            node = child
        self._settle(accepted, node)

    def _settle(self, accepted: list[Node], last: Node) -> None:
        """Settles the accepted nodes and the target's own token behind the last of them."""
        output = self._recording.output
        for node in accepted:
            assert node.parent is not None
            node.parent.settled = node
        token = output[last.index + 1]
        root = last.child(token)
        if root is None:
            root = Node(token, last.index + 1, last, 1.0)
        last.settled = root
        for node in (*accepted, root):
            self._learn(node)
            assert node.parent is not None
            for each in node.parent.children:
                if each.grafted:
                    rates = self._known.broken_first, self._known.broken_later
                    rates[each.grafted - 1].observe_outcomes([each is node])
        if self._shape.has_broken_runs and not root.children and last.children:
            others = [each for each in last.children if each is not root]
            if others and not root.is_expanded:
                dead = max(others, key=lambda each: each.chance)
                graft(root, dead, output, self._known)
        self._root = root
        self._ids += [each.token for each in (*accepted, root)]
        if last is not self._start:
            self._known.observe_forward(len(accepted) + 1, self.now - self._verified_ns)
        else:
            self.outcome.first_token_ns = self.now
        self._verified_ns = self.now
        self.outcome.decode_ns = self.now - self.outcome.first_token_ns
        self._target.occupy(self._costs.target_message_ns + self._costs.target_scheduling_ns())
        self._send(partial(self._reach_draft, root))
        if not self._shape.takes_turns or last is self._start:
            self._drive_target()

    def _learn(self, right: Node) -> None:
        """Learns from the settled token of an index what its siblings' chances should have been."""
        parent = right.parent
        assert parent is not None
        named = [each for each in parent.children if each.bucket is not None]
        for each in named:
            assert each.bucket is not None
            self._known.calibration.observe(each.bucket, each is right)
        if named:
            self._known.covered.observe_outcomes([right in named])

    # The draft.

    def _begin_draft(self) -> None:
        self._has_begun = True
        self._name(self._start, self.now)
        self._tell()
        self._drive_draft()

    def _drive_draft(self) -> None:
        if self._draft.is_busy or self._is_finished or self._is_turn or not self._has_begun:
            return
        if self._shape.takes_turns and self._seen is not self._root:
            return
        leaves = self._leaves()
        rows, chosen = self._choose_leaves(leaves)
        if not chosen:
            if self._shape.takes_turns:
                self._is_turn = True
                self._draft.occupy(self._costs.draft_message_ns)
                self._send(self._reach_target)
            return
        fed, node = 0, chosen[0].parent
        while node is not None and not node.is_fed:
            node.is_fed, fed, node = True, fed + 1, node.parent
        for each in chosen:
            each.is_fed = True
        guess = self._guess(chosen[0]) if self._shape.has_guesses else []
        duration = self._draft_ns(rows + fed + len(guess))
        self._draft.run(duration, partial(self._finish_draft, chosen, guess))

    def _leaves(self) -> list[tuple[float, Node]]:
        """Returns the nodes that can be extended, the likeliest first."""
        ends = self._recording.end_token_ids
        shape, leaves = self._shape, []
        most = shape.most_nodes - 1 if shape.takes_turns else shape.most_ahead
        if not self._seen.is_expanded and not self._seen.is_fed:
            leaves.append((1.0, self._seen))
        for num, (reach, node) in enumerate(best_first(self._seen)):
            if reach < shape.least_reach or num >= most:
                break
            if not node.is_fed and node.token not in ends:
                leaves.append((reach, node))
                if len(leaves) >= shape.most_leaves:
                    break
        return leaves

    def _choose_leaves(self, leaves: list[tuple[float, Node]]) -> tuple[int, list[Node]]:
        """Returns the rows and nodes of the draft's next step that gain most a time; none if
        the target's turn is worth more."""
        best, value, total = 0, 0.0, 0.0
        for num, (reach, _) in enumerate(leaves, 1):
            # Guesses extend the likeliest leaf by several tokens in one step.
            total += reach * (self._known.levels if num == 1 else 1.0)
            gain = self._known.covered.rate * total
            if self._shape.takes_turns:
                found = gain - self._speed * self._draft_ns(num)
            else:
                found = gain / self._draft_ns(num)
            if found > value:
                best, value = num, found
        return best, [node for _, node in leaves[:best]]

    def _guess(self, leaf: Node) -> list[int]:
        """Returns tokens to feed behind a leaf: grafted nodes, or else a continuation."""
        if any(not each.is_fed for each in leaf.children):
            return []  # grafted nodes are leaves of their own
        path = leaf.path()
        return continuation(path) if path else []

    def _finish_draft(self, chosen: list[Node], guess: list[int]) -> None:
        ready = 0.0 if self._shape.takes_turns else self.now + 2 * self._costs.leg_ns()
        for node in chosen:
            self._name(node, ready)
        node, num_levels = chosen[0], 1
        for token in guess:
            child = node.child(token)
            if child is None or child.is_fed or token in self._recording.end_token_ids:
                break
            child.is_fed = True
            self._name(child, ready)
            node = child
            num_levels += 1
        self._known.levels += _NEW * (num_levels - self._known.levels)
        self._tell()
        self._drive_draft()

    def _name(self, node: Node, ready_ns: float) -> None:
        """Gives a node the draft's choices as children."""
        output = self._recording.output
        choices = self._recording.choices(node.index + 1, node.wrong)[: self._shape.num_choices]
        for each in node.children:
            each.chance = LEAST
        for rank, (token, probability) in enumerate(choices):
            bucket = self._known.calibration.bucket(rank, probability)
            chance = self._known.calibration.chance(bucket, probability)
            child = node.child(token)
            if child is None and node.settled is not None and node.settled.token == token:
                child = node.settled
                node.children.append(child)
            if child is None:
                wrong = node.wrong
                if wrong or output[node.index + 1 : node.index + 2] != (token,):
                    wrong = (*wrong, token)
                child = Node(token, node.index + 1, node, chance, wrong, ready_ns=ready_ns)
                node.children.append(child)
            child.chance, child.bucket = chance, bucket
        node.is_fed = node.is_expanded = True
        if node.settled is not None:
            self._learn(node.settled)

    def _tell(self) -> None:
        """Sends the new nodes, if the target does not wait for its turn."""
        if not self._shape.takes_turns:
            self._draft.occupy(self._costs.draft_message_ns)
            self._send(self._reach_target)

    def _reach_target(self) -> None:
        self._target.occupy(self._costs.target_message_ns)
        self._drive_target()

    def _reach_draft(self, root: Node) -> None:
        self._seen = root
        self._draft.occupy(self._costs.draft_message_ns, by_others=True)
        self._drive_draft()

    # Times.

    @property
    def _speed(self) -> float:
        return self._known.speed or 1 / self._forward_ns(1)

    def _forward_ns(self, num_rows: int) -> float:
        return self._costs.target_ns(num_rows, self._recording.num_prompt_tokens + len(self._ids))

    def _draft_ns(self, num_rows: int) -> float:
        return self._costs.draft_ns(
            num_rows, self._recording.num_draft_prompt_tokens + len(self._ids)
        )

    def _send(self, deliver: Callable[[], None]) -> None:
        self.call_after(2 * self._costs.leg_ns(), deliver)
