"""How one request is decoded: its policy and the choice of visual tokens."""

from dataclasses import dataclass

from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import Gamma, Policy, make_policy
from hippo.types import Pruning


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """The options of speculative decoding of one request, within the operator's limits."""

    policy_name: str
    gamma: Gamma
    max_draft_tokens: int
    pruning: Pruning
    guesses: bool = True  # the draft feeds guesses
    is_default: bool = False  # the request sets no policy, preset or draft length

    def make_policy(self, times: PairTimes | None = None) -> Policy:
        """Returns the policy of one sequence; ``times`` are earlier measurements of the pair."""
        return make_policy(
            self.policy_name,
            gamma=self.gamma,
            max_draft_tokens=self.max_draft_tokens,
            times=times,
        )

    @property
    def wants_draft(self) -> bool:
        return self.policy_name != "off"
