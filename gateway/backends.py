"""All target and draft services of the gateway, and the choice of a pair for each request.

Rendezvous hashing (Thaler and Ravishankar, 1996) maps requests about one clip to one of the targets
that serve the model, because that target may have cached the clip. If the target has no free slot,
the least loaded target is chosen. A draft is chosen in this way among the drafts that fit the
target. A service that has failed is not chosen until it serves again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config import GatewaySettings
from gateway.errors import ModelNotFoundError
from gateway.targets import Draft, Pair, Target, choose_service
from gateway.watch import Watch
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
        self.drafts: list[Draft] = [
            Watch("draft", DraftClient(address, **options), on_change=self._match)
            for address in settings.draft
        ]
        self.targets = [
            Target(
                TargetClient(address, **options),
                self.drafts,
                calibration_share=settings.calibration_share,
                on_change=self._match,
            )
            for address in settings.target
        ]

    def _match(self) -> None:
        for target in self.targets:
            target.match_drafts()

    async def start(self) -> None:
        """Starts watching all services; does not wait for them to serve."""
        for target in self.targets:
            target.start()
        for draft in self.drafts:
            draft.start()

    async def close(self) -> None:
        """Stops watching and closes all connections."""
        await asyncio.gather(
            *(target.close() for target in self.targets),
            *(draft.close() for draft in self.drafts),
        )

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
        return None if self.has_draft else self.targets[0].draft_problem

    @property
    def models(self) -> list[ModelInfo]:
        """The served models, one per name. Raises UnavailableError while every target is down."""
        found = [target.info for target in self.targets if target.info is not None]
        if not found:
            raise UnavailableError("; ".join(target.problem for target in self.targets))
        return list({info.name: info for info in reversed(found)}.values())[::-1]

    def model(self, name: str | None = None) -> ModelInfo:
        """Returns the model that is served as ``name``; None stands for the first served model.

        Raises ModelNotFoundError for an unknown name, UnavailableError while every target is down.
        """
        models = self.models
        for info in models:
            if name in (None, info.name):
                return info
        names = ", ".join(repr(info.name) for info in models)
        raise ModelNotFoundError(
            f"there is no model {name!r} here; {names} is served", param="model"
        )

    def pair(self, name: str | None, key: bytes = b"") -> Pair:
        """Returns the target for a request to the model ``name``, with its draft.

        Requests with one ``key`` get one target while it has a free slot. Raises as ``model`` does.
        """
        name = self.model(name).name
        serving = [each for each in self.targets if each.info and each.info.name == name]
        return Pair(choose_service(serving, key), key)
