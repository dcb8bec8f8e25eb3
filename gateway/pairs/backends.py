"""All target and draft services of the gateway, and the choice of a pair for each request.

Rendezvous hashing (Thaler and Ravishankar, 1996) maps requests about one clip to one of the targets
that serve the model, because that target may have cached the clip. The hash is of the clip and the
target's address, so several gateways before the same services agree. The services alone know how
many of their slots are free: a request is offered to each target in the order of the hashes, on
condition of a free slot, and waits in a target's queue only if all have refused it. A draft is
preferred on the target's host, and otherwise chosen by hash among the drafts that fit the target. A
service that has failed is not chosen until it serves again.
"""

import asyncio
from typing import Any

from gateway.common.config import GatewaySettings
from gateway.common.errors import ModelNotFoundError
from gateway.pairs.discovery import Pool
from gateway.pairs.targets import Draft, Pair, Target, by_load, by_rank
from gateway.pairs.watch import Watch
from hippo.errors import UnavailableError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo


class Backends:
    """The target and draft services, with their health."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises InvalidRequestError for a missing TLS file."""
        options: dict[str, Any] = {
            "tls": settings.tls,
            "max_message_bytes": settings.max_message_bytes,
            "silence_seconds": settings.services_silence_s,
        }

        def make_draft(address: str, name: str) -> Draft:
            client = DraftClient(address, tls_name=name, **options)
            return Watch("draft", client, on_change=self._match)

        def make_target(address: str, name: str) -> Target:
            return Target(
                TargetClient(address, tls_name=name, **options),
                self._drafts,
                calibration_share=settings.calibration_share,
                on_change=self._match,
            )

        period_s = settings.lookup_period_s
        self._drafts = Pool(settings.draft, make_draft, self._match, period_s=period_s)
        self._targets = Pool(settings.target, make_target, self._match, period_s=period_s)
        # All that requests may use, serving or not; the pools change the lists in place.
        self.drafts: list[Draft] = self._drafts.services
        self.targets: list[Target] = self._targets.services

    def _match(self) -> None:
        for target in self.targets:
            target.match_drafts()

    async def start(self) -> None:
        """Starts watching all services; does not wait for them to serve."""
        self._targets.start()
        self._drafts.start()

    async def close(self) -> None:
        await asyncio.gather(self._targets.close(), self._drafts.close())

    @property
    def has_choice(self) -> bool:
        """Whether there are several targets or drafts."""
        return len(self.targets) > 1 or len(self.drafts) > 1

    @property
    def num_targets_up(self) -> int:
        return sum(target.info is not None for target in self.targets)

    @property
    def num_drafts_up(self) -> int:
        return sum(draft.info is not None for draft in self.drafts)

    @property
    def has_draft(self) -> bool:
        """Whether at least one target has a draft that fits."""
        return any(target.fitting_drafts for target in self.targets)

    def draft_problem(self) -> str | None:
        """Returns why no target has a draft; None if at least one target has a draft."""
        if self.has_draft:
            return None
        return self.targets[0].draft_problem if self.targets else "no target service was found"

    @property
    def models(self) -> list[ModelInfo]:
        """The served models, one per name. Raises UnavailableError while every target is down."""
        found = [target.info for target in self.targets if target.info is not None]
        if not found:
            problems = [target.problem for target in self.targets] or self._targets.problems
            raise UnavailableError("; ".join(problems))
        return list({info.name: info for info in reversed(found)}.values())[::-1]

    def model(self, name: str | None = None) -> ModelInfo:
        """Returns the model that is served as ``name``; None stands for the first served model.

        Raises ModelNotFoundError for an unknown name. Raises UnavailableError while every target is
        down, or if a target that is down served the name, or may serve it: the model of a target
        that has never answered is not known.
        """
        models = self.models
        for info in models:
            if name in (None, info.name):
                return info
        down = [target for target in self.targets if target.info is None]
        problems = [each.problem for each in down if each.served_name in (None, name)]
        problems += self._targets.problems
        if problems:
            raise UnavailableError("; ".join(problems))
        names = ", ".join(repr(info.name) for info in models)
        raise ModelNotFoundError(
            f"there is no model {name!r} here; {names} is served", param="model"
        )

    def pair(self, name: str | None) -> Pair:
        """Returns the least loaded target of the model ``name``. Raises as ``model`` does."""
        return Pair(by_load(self._serving(name))[0], b"")

    def pairs(self, name: str | None, key: bytes) -> list[Pair]:
        """Returns where to offer a request to the model ``name``, in order.

        If there are several targets, each that is not known to be full is first asked for a free
        slot, in the order that depends on the ``key`` alone. Raises as ``model`` does.
        """
        serving = self._serving(name)
        free = [each for each in by_rank(serving, key) if not each.is_full]
        offers = [Pair(each, key, must_not_wait=True) for each in free]
        waits = [Pair(each, key) for each in by_load(by_rank(serving, key))]
        return waits if len(serving) == 1 else offers + waits

    def _serving(self, name: str | None) -> list[Target]:
        name = self.model(name).name
        return [each for each in self.targets if each.info and each.info.name == name]
