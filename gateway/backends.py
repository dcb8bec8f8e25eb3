"""All targets and drafts behind the gateway, and which of them a request gets.

A target is chosen among those that serve the model: the one that a request about the same clip had
before, by rendezvous hashing (Thaler and Ravishankar, 1996), because it may have cached what the
two share; the least loaded one if that one has no slot free. So with the draft, among those that
fit the target. An unhealthy service is left out until it is well again.
"""

from __future__ import annotations

import asyncio

from gateway.config import GatewaySettings
from gateway.errors import ModelNotFoundError
from gateway.targets import Draft, Pair, Target, choose
from gateway.watch import Watch
from hippo.errors import UnavailableError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import ModelInfo


class Backends:
    """The targets and the drafts, each up or not."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises InvalidRequestError for a missing TLS file."""
        tls, silence_s = settings.tls, settings.services_silence_s
        self.drafts: list[Draft] = [
            Watch(
                "draft", DraftClient(address, tls, silence_seconds=silence_s), on_change=self._match
            )
            for address in settings.draft
        ]
        self.targets = [
            Target(
                TargetClient(address, tls, silence_seconds=silence_s),
                self.drafts,
                calibration_share=settings.calibration_share,
                on_change=self._match,
            )
            for address in settings.target
        ]

    def _match(self) -> None:
        for target in self.targets:
            target.match()

    async def start(self) -> None:
        """Begins to watch; returns at once."""
        for target in self.targets:
            target.start()
        for draft in self.drafts:
            draft.start()

    async def close(self) -> None:
        """Stops watching and closes the connections."""
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
        """Whether some target has a draft that fits."""
        return any(target.fitting_drafts for target in self.targets)

    def draft_problem(self) -> str | None:
        """Why no target has a draft; None if one has."""
        return None if self.has_draft else self.targets[0].draft_problem

    @property
    def models(self) -> list[ModelInfo]:
        """What is served, one of each name. Raises UnavailableError while every target is down."""
        found = [target.info for target in self.targets if target.info is not None]
        if not found:
            raise UnavailableError("; ".join(target.problem for target in self.targets))
        return list({info.name: info for info in reversed(found)}.values())[::-1]

    def model(self, name: str | None = None) -> ModelInfo:
        """What is served under ``name`` (None: the first there is).

        Raises ModelNotFoundError for another name, UnavailableError while every target is down.
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
        """The target for a request about ``name``, with its draft. Requests with one ``key``
        come to the same as long as it has a slot free. Raises as ``model`` does."""
        name = self.model(name).name
        serving = [each for each in self.targets if each.info and each.info.name == name]
        return Pair(choose(serving, key), key)
