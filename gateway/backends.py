"""All targets and drafts behind the gateway, and which of them a request gets.

A target is chosen among those that serve the model: the one that a request about the same clip had
before, by rendezvous hashing (Thaler and Ravishankar, 1996), because it may have cached what the
two share; the least loaded one if that one has no slot free. So with the draft, among those that
fit the target. An unhealthy service is left out until it is well again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from gateway.baseline import Baseline, Calibration
from gateway.errors import ModelNotFoundError
from gateway.targets import Draft, Pair, Target, choose
from gateway.watch import Watch
from hippo.errors import ModelLoadError, UnavailableError
from hippo.rpc.client import DraftClient, TargetClient
from hippo.rpc.options import DEFAULT_SILENCE_SECONDS, TlsFiles
from hippo.types import ModelInfo


class Backends:
    """The targets and the drafts. Addresses are host:port."""

    def __init__(
        self,
        targets: Mapping[str, Baseline],
        drafts: Sequence[str] = (),
        *,
        tls: TlsFiles | None = None,
        calibration_share: float = 0.0,
        silence_s: float = DEFAULT_SILENCE_SECONDS,
    ) -> None:
        """``targets``: what each takes alone, by its address, learnt as requests go by.
        ``calibration_share`` of the requests are run target-only to know each target's pace.
        A service that answers no ping for ``silence_s`` is given up.

        Raises InvalidRequestError for a missing TLS file.
        """
        self._calibration_share = calibration_share
        self._drafts: list[Draft] = [
            Watch(
                "draft", DraftClient(address, tls, silence_seconds=silence_s), on_change=self._match
            )
            for address in drafts
        ]
        self._targets = [
            self._make_target(TargetClient(address, tls, silence_seconds=silence_s), baseline)
            for address, baseline in targets.items()
        ]

    def _make_target(self, client: TargetClient, baseline: Baseline) -> Target:
        async def load_tokenizer(info: ModelInfo) -> None:
            # A large one takes a while to build; answers must not wait for it.
            try:
                build = Tokenizer.from_buffer
                target.tokenizer = await asyncio.to_thread(build, info.tokenizer_json)
            except Exception as error:  # tokenizers has no type of its own for it
                raise ModelLoadError(
                    f"tokenizers {tokenizers.__version__}, the gateway's, cannot read the "
                    f"tokenizer of {info.name} at {client.address} ({error}): install the version "
                    "that the target service has"
                ) from None

        watch = Watch("target", client, on_change=self._match, prepare=load_tokenizer)
        target = Target(watch, baseline, Calibration(self._calibration_share, baseline))
        return target

    def _match(self) -> None:
        for target in self._targets:
            target.match(self._drafts)

    async def start(self) -> None:
        """Begins to watch; returns at once."""
        for target in self._targets:
            target.watch.start()
        for draft in self._drafts:
            draft.start()

    async def close(self) -> None:
        """Stops watching and closes the connections."""
        await asyncio.gather(
            *(target.watch.close() for target in self._targets),
            *(draft.close() for draft in self._drafts),
        )

    @property
    def targets(self) -> Sequence[Target]:
        """All of them, up or not."""
        return self._targets

    @property
    def drafts(self) -> Sequence[Draft]:
        """All of them, up or not."""
        return self._drafts

    @property
    def has_choice(self) -> bool:
        """Whether there are several targets or drafts."""
        return len(self._targets) > 1 or len(self._drafts) > 1

    @property
    def num_targets_up(self) -> int:
        return sum(target.info is not None for target in self._targets)

    @property
    def num_drafts_up(self) -> int:
        return sum(draft.info is not None for draft in self._drafts)

    @property
    def has_draft(self) -> bool:
        """Whether some target has a draft that fits."""
        return any(target.fitting_drafts for target in self._targets)

    def draft_problem(self) -> str | None:
        """Why no target has a draft; None if one has."""
        if self.has_draft or not self._targets:
            return None
        return self._targets[0].draft_problem(self._drafts)

    @property
    def models(self) -> list[ModelInfo]:
        """What is served, one of each name. Raises UnavailableError while every target is down."""
        found = [target.info for target in self._targets if target.info is not None]
        if not found:
            raise UnavailableError("; ".join(target.watch.problem for target in self._targets))
        return list({info.name: info for info in reversed(found)}.values())[::-1]

    def describe(self, name: str) -> list[dict[str, Any]]:
        """The targets that serve ``name`` and the drafts: where, whether up, and how busy."""
        serving = [each.watch for each in self._targets if each.info and each.info.name == name]
        down = [each.watch for each in self._targets if each.info is None]
        return [
            {
                "service": noun,
                "address": watch.address,
                "is_up": watch.info is not None,
                "problem": None if watch.info is not None else watch.problem,
                "num_running": watch.num_running,
                "num_slots": None if watch.info is None else watch.info.num_slots,
            }
            for noun, watches in (("target", [*serving, *down]), ("draft", self._drafts))
            for watch in watches
        ]

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

    def tokenizer(self, name: str | None = None) -> Tokenizer:
        """The tokenizer of a model. Raises as ``model`` does."""
        name = self.model(name).name
        target = next(each for each in self._targets if each.info and each.info.name == name)
        assert target.tokenizer is not None
        return target.tokenizer

    def pair(self, name: str | None, key: bytes = b"") -> Pair:
        """The target for a request about ``name``, with its draft. Requests with one ``key``
        come to the same as long as it has a slot free. Raises as ``model`` does."""
        info = self.model(name)
        serving = [each for each in self._targets if each.info and each.info.name == info.name]
        target = choose(serving, key)
        assert target.info is not None
        return Pair(target, self._drafts, model=target.info, key=key)
