"""A target service with the drafts that fit it, and the pair that serves a request."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tokenizers
from tokenizers import Tokenizer

from gateway.common.baseline import Baseline
from gateway.pairs.discovery import Pool
from gateway.pairs.token_bytes import TokenBytes
from gateway.pairs.watch import Watch
from hippo.base.texts import TextLimit
from hippo.base.tracing import current_span
from hippo.catalog.pair import check_pair
from hippo.errors import (
    IncompatiblePairError,
    MediaPathError,
    ModelLoadError,
    OverloadedError,
    UnavailableError,
)
from hippo.rpc.client import DraftClient, TargetClient
from hippo.speculation.estimates import PairTimes
from hippo.types import ModelInfo

logger = logging.getLogger("gateway.pairs.backends")

_LONGEST_ANSWER_S = 60.0  # OpenAI's clients heed no longer wait than a minute
_NEW_SHARE = 0.1  # weight of the latest answer in the running mean

Draft = Watch[DraftClient]
ServiceT = TypeVar("ServiceT", "Target", Draft)


class Target(Watch[TargetClient]):
    """A target service with its measurements, and the drafts among ``drafts`` that fit it."""

    def __init__(
        self,
        client: TargetClient,
        drafts: Pool[Draft],
        *,
        calibration_share: float,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__("target", client, on_change=on_change)
        self.baseline = Baseline(calibration_share)  # step times of target-only decoding
        self.answer_s = OverloadedError.retry_after_s  # running mean: how long an answer has a slot
        self.fitting_drafts: list[Draft] = []  # serving drafts that fit
        self.served_name: str | None = None  # kept while the target is down
        # These three are set when the target first serves, before ``info`` is.
        self.tokenizer: Tokenizer
        self.token_bytes: TokenBytes
        self.text_limit: TextLimit
        self._drafts = drafts
        self._drafts_changed = asyncio.Event()
        self._misfits: dict[Draft, str] = {}  # why a draft does not fit
        self._times: dict[str, PairTimes] = {}  # the key is the draft's address

    @property
    def draft_problem(self) -> str | None:
        """Why the target has no draft; None if it has one."""
        if self.fitting_drafts:
            return None
        problems = [self._misfits.get(each, each.problem) for each in self._drafts.services]
        problems += self._drafts.problems
        return "; ".join(dict.fromkeys(problems)) or "no draft service is configured"

    def times(self, draft: Draft | None) -> PairTimes:
        """Returns the measurements of the target with ``draft``; None: of the target alone."""
        times = self._times.setdefault(draft.address if draft is not None else "", PairTimes())
        times.takes_turns = draft is not None and bool(self._shared_gpus(draft))
        return times

    def note_answer(self, seconds: float) -> None:
        """Adds the time that an answer had a slot to the running mean ``answer_s``."""
        self.answer_s += (min(seconds, _LONGEST_ANSWER_S) - self.answer_s) * _NEW_SHARE

    async def wait_fitting(self) -> None:
        while not self.fitting_drafts:
            self._drafts_changed.clear()
            await self._drafts_changed.wait()

    def match_drafts(self) -> None:
        """Finds the drafts that fit, logs new misfits, and forgets drafts that are gone."""
        fitting, misfits = [], {}
        known = {"", *(draft.address for draft in self._drafts.services)}
        self._times = {key: times for key, times in self._times.items() if key in known}
        for draft in self._drafts.services:
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
                if draft not in self.fitting_drafts and (shared := self._shared_gpus(draft)):
                    logger.warning(
                        "draft and target run on one GPU (%s): they take turns instead of working "
                        "at once, so the gain from running in parallel is lost; give each its own",
                        ", ".join(shared),
                    )
        self.fitting_drafts, self._misfits = fitting, misfits
        if fitting:
            self._drafts_changed.set()

    def _shared_gpus(self, draft: Draft) -> list[str]:
        """Returns the UUIDs of the GPUs on which both models run."""
        known = [info.device_uuids for info in (draft.info, self.info) if info is not None]
        return sorted(set(known[0]).intersection(known[1])) if len(known) == 2 else []

    async def _prepare(self, info: ModelInfo) -> None:
        self.served_name = info.name
        # Building a large tokenizer takes a while and must not block the event loop.
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer.from_buffer, info.tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ModelLoadError(
                f"tokenizers {tokenizers.__version__}, the gateway's, cannot read the "
                f"tokenizer of {info.name} at {self.address} ({error}): install the version "
                "that the target service has"
            ) from None
        self.token_bytes = TokenBytes(self.tokenizer)
        self.text_limit = TextLimit(self.tokenizer, info.max_context_length)


@dataclass(frozen=True, slots=True)
class Pair:
    """The target of one request, and the choice of its draft, which may change over time."""

    target: Target
    key: bytes  # for ``by_rank``
    must_not_wait: bool = False  # for a slot of the target

    @property
    def draft(self) -> Draft | None:
        """The best draft now, by rank among those with a free slot, on the target's host if one
        there has any; if all are full, the least loaded one. None while no serving draft fits."""
        fitting = self.target.fitting_drafts
        free = [each for each in by_rank(fitting, self.key) if not each.is_full]
        near = [each for each in free if each.host == self.target.host]
        return next(iter(near or free or by_load(fitting)), None)

    @property
    def draft_cache_tokens(self) -> int:
        """How many tokens of a sequence any draft that fits the target caches; 0: there is none."""
        infos = [draft.info for draft in self.target.fitting_drafts]
        return min((info.slot_tokens for info in infos if info is not None), default=0)

    def nearer_draft(self, draft: Draft | None) -> Draft | None:
        """Returns the best draft if it is on the target's host and ``draft`` is on another one."""
        best, host = self.draft, self.target.host
        is_nearer = best is not None and best.host == host
        return best if is_nearer and draft is not None and draft.host != host else None

    def media_dirs(self, *, wants_draft: bool) -> list[tuple[str, ...]]:
        """Returns the directories whose files the target, and the draft if there is one, open."""
        draft = self.draft if wants_draft else None
        infos = [self.target.info, *([draft.info] if draft is not None else [])]
        return [() if info is None else info.media_dirs for info in infos]

    async def wait_draft(self) -> Draft:
        """Waits for a usable draft and returns it; waits without end if none is configured."""
        while (draft := self.draft) is None:
            await self.target.wait_fitting()
        return draft


async def follow_first(
    pairs: Sequence[Pair],
    follow: Callable[[Pair], Awaitable[None]],
    fall_back: Callable[[MediaPathError], Awaitable[None]],
    has_begun: Callable[[], bool],
) -> None:
    """Awaits ``follow`` for the first of the pairs whose target takes the sequence.

    A target that has no free slot, is stopping or is lost before ``has_begun`` is left for the next
    pair. One that cannot open a file is asked again after ``fall_back``. Raises any other error,
    and any error of the last pair.
    """

    async def offer(pair: Pair) -> None:
        with pair.target.count_sequence():
            try:
                await follow(pair)
            except MediaPathError as error:
                await fall_back(error)
                await follow(pair)

    *others, last = pairs
    for pair in others:
        if pair.target.info is None:
            continue
        try:
            await offer(pair)
        except (OverloadedError, UnavailableError) as error:
            if has_begun():
                raise
            current_span().add_event("target refused", problem=error.message)
            if isinstance(error, OverloadedError):
                pair.target.report_refusal()
            else:
                pair.target.report_failure()
        else:
            return
    await offer(last)


def by_rank(services: Sequence[ServiceT], key: bytes) -> list[ServiceT]:
    """Returns the services in the order in which a ``key`` prefers them: by the hash of key and
    address, so that all gateways have one order (Thaler and Ravishankar, 1996)."""
    return sorted(
        services, key=lambda each: hashlib.sha256(key + b"\0" + each.address.encode()).digest()
    )


def by_load(services: Sequence[ServiceT]) -> list[ServiceT]:
    """Returns the services, those with the fewest of this gateway's sequences per slot first."""
    return sorted(services, key=lambda each: each.load)
