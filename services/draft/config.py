"""The draft service's settings."""

from dataclasses import dataclass, replace

from hippo.base.config import setting
from hippo.models.interface.plan import LoadPlan
from hippo.service.settings import EngineSettings
from hippo.types import MIN_VISUAL_TOKENS, PRUNING_RATIO

ENV_PREFIX = "HIPPO_DRAFT"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(EngineSettings):
    """Adds the guess length. A draft has no queue; without a free slot the target decodes alone."""

    port: int = setting(50051, help="port to listen on; 0: any free one", least=0, most=65535)
    max_guessed: int = setting(
        4,
        help="most tokens that a drafting step guesses from earlier text (three times as many from "
        "a rejected draft); the draft verifies them in the same forward; 0: none",
        least=0,
    )

    cache_tokens: int | None = setting(
        None,
        help="tokens of a sequence that are cached; auto: a quarter of the context for text and "
        f"answer, and {1 - PRUNING_RATIO:.0%} of the rest, at least {MIN_VISUAL_TOKENS}, for the "
        "visual tokens that are kept of videos (default: auto)",
    )

    @property
    def load_plan(self) -> LoadPlan:
        """How to load the model; in half precision by default, as the target settles all tokens."""
        plan = self._load_plan(auto_is_half=True)
        return replace(plan, cache_tokens=self.cache_tokens, prunes=True)
