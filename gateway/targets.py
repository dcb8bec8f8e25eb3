"""One target and the drafts that fit it, and the pair of them that a request gets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tokenizers import Tokenizer

from gateway.baseline import Baseline, Calibration
from gateway.watch import Watch
from hippo.errors import IncompatiblePairError
from hippo.pair import check_pair
from hippo.rpc.client import DraftClient, TargetClient
from hippo.speculation.estimates import PairTimes
from hippo.types import ModelInfo

logger = logging.getLogger("gateway.backends")

Draft = Watch[DraftClient]
ServiceT = TypeVar("ServiceT", "Target", Draft)


class Target:
    """A target service, what was learnt about it, and which drafts fit it."""

    def __init__(
        self, watch: Watch[TargetClient], baseline: Baseline, calibration: Calibration
    ) -> None:
        self.watch = watch
        self.tokenizer: Tokenizer | None = None  # there once ``watch.info`` is
        self.baseline = baseline
        self.calibration = calibration
        self._drafts_changed = asyncio.Event()
        self._fitting: list[Draft] = []
        self._misfits: dict[Draft, str] = {}  # why
        self._times: dict[str, PairTimes] = {}

    @property
    def address(self) -> str:
        return self.watch.address

    @property
    def load(self) -> float:
        return self.watch.load

    @property
    def num_running(self) -> int:
        return self.watch.num_running

    @property
    def info(self) -> ModelInfo | None:
        return self.watch.info

    @property
    def fitting_drafts(self) -> list[Draft]:
        """Drafts that serve and fit."""
        return list(self._fitting)

    def times(self, draft: Draft | None) -> PairTimes:
        """What was measured of this target with that draft; without one, of the target alone."""
        return self._times.setdefault(draft.address if draft is not None else "", PairTimes())

    async def wait_fitting(self) -> None:
        """Returns when a draft fits."""
        while not self._fitting:
            self._drafts_changed.clear()
            await self._drafts_changed.wait()

    def draft_problem(self, drafts: Sequence[Draft]) -> str | None:
        """Why there is no draft for it; None if there is one."""
        if not drafts:
            return "no draft service is configured"
        if self._fitting:
            return None
        problems = [self._misfits.get(draft, draft.problem) for draft in drafts]
        return "; ".join(dict.fromkeys(problems))

    def match(self, drafts: Iterable[Draft]) -> None:
        """Finds the drafts that fit; says so in the log where it changes."""
        fitting, misfits = [], {}
        for draft in drafts:
            if draft.info is None or self.info is None:
                continue
            try:
                check_pair(draft.info, self.info)
            except IncompatiblePairError as error:
                misfits[draft] = error.message
                if self._misfits.get(draft) != error.message:
                    logger.error("the draft is not used: %s", error.message)
            else:
                fitting.append(draft)
                if draft not in self._fitting:
                    self._warn_if_shared(draft.info, self.info)
        self._fitting, self._misfits = fitting, misfits
        if fitting:
            self._drafts_changed.set()

    @staticmethod
    def _warn_if_shared(draft: ModelInfo, target: ModelInfo) -> None:
        if shared := sorted(set(draft.device_uuids) & set(target.device_uuids)):
            logger.warning(
                "draft and target run on one GPU (%s): they take turns instead of working at "
                "once, so most of the gain from running in parallel is lost; give each its own",
                ", ".join(shared),
            )


class Pair:
    """The target of one request, and its draft: the one it would get now, or gets later."""

    def __init__(
        self, target: Target, drafts: Sequence[Draft], *, model: ModelInfo, key: bytes
    ) -> None:
        assert target.tokenizer is not None
        self.model = model
        self.tokenizer = target.tokenizer
        self.baseline = target.baseline
        self.calibration = target.calibration
        self._target = target
        self._drafts = drafts
        self._key = key

    @property
    def target(self) -> TargetClient:
        return self._target.watch.client

    @property
    def times(self) -> PairTimes:
        """What earlier requests measured of this pair."""
        return self._target.times(self._draft)

    @property
    def draft(self) -> DraftClient | None:
        """A draft that serves, fits and is the best choice now; or None."""
        draft = self._draft
        return None if draft is None else draft.client

    @property
    def draft_model(self) -> ModelInfo | None:
        """What a draft serves, whether or not it fits; None while there is none."""
        return next((draft.info for draft in self._drafts if draft.info is not None), None)

    @property
    def draft_problem(self) -> str | None:
        """Why there is no usable draft; None if there is one."""
        return self._target.draft_problem(self._drafts)

    async def wait_draft(self) -> DraftClient:
        """Returns a draft as soon as one is usable; for ever without one configured."""
        while (draft := self.draft) is None:
            await self._target.wait_fitting()
        return draft

    @contextlib.contextmanager
    def at_target(self) -> Iterator[None]:
        """Around a sequence there: part of the target's load."""
        with self._target.watch.sequence():
            yield

    @contextlib.contextmanager
    def at_draft(self, client: DraftClient) -> Iterator[None]:
        """Around a sequence there: part of the draft's load."""
        with self._watch(client).sequence():
            yield

    def report_draft_failure(self, client: DraftClient) -> None:
        """A drafting stream broke: the draft is not used until it is found well again."""
        self._watch(client).report_failure()

    def report_target_failure(self) -> None:
        """A verification stream broke: the target counts as down until it is found well again."""
        self._target.watch.report_failure()

    @property
    def _draft(self) -> Draft | None:
        fitting = self._target.fitting_drafts
        return choose(fitting, self._key) if fitting else None

    def _watch(self, client: DraftClient) -> Draft:
        return next(draft for draft in self._drafts if draft.client is client)


def choose(services: Sequence[ServiceT], key: bytes) -> ServiceT:
    """The service that ``key`` belongs to while it has a slot free, else the least loaded one."""
    if len(services) == 1:
        return services[0]

    def rank(service: ServiceT) -> bytes:
        return hashlib.sha256(key + b"\0" + service.address.encode()).digest()

    ranked = sorted(services, key=rank)
    if key and ranked[0].load < 1:
        return ranked[0]
    return min(ranked, key=lambda service: service.load)
