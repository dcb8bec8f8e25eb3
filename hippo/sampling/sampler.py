"""The token rule for one sequence, which caches token counts and noise between steps."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hippo.errors import HippoError
from hippo.models.interface.transfer import to_device
from hippo.sampling.logprobs import floats, pack_logprobs, unpack_logprobs
from hippo.sampling.masks import TokenMasks, mask_logits, num_common
from hippo.sampling.noise import noise_key, noise_rows
from hippo.sampling.rule import choose_tokens, penalise, propose_tokens
from hippo.speculation.branches import Proposal
from hippo.speculation.sharpness import SHARPNESSES, Sharpness
from hippo.types import SamplingParams

_NOISE_ELEMENTS = 1 << 14  # computed at once, so that many rows of a small vocabulary share kernels
# Most float64 numbers cached per sequence; a large vocabulary's block of 40 MB is not kept.
_KEPT_ELEMENTS = 1 << 18
_NUM_BEST = 4  # numbers of a proposal: two ids and their scores
_MOST_ODDS = 700.0  # largest argument of exp


class TokenSampler:
    """Chooses the tokens of one sequence; the state is only a cache and does not affect results.

    Not thread-safe. ``num_token_ids`` is the width of the logits. ``params.min_tokens`` excludes
    ``end_token_ids`` from the first tokens; with ``masks``, the masks do so. A draft's sampler
    ``proposes``; at a temperature above 0 it has a ``sharpness``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | torch.Tensor,
        num_token_ids: int,
        device: torch.device | str = "cpu",
        *,
        end_token_ids: Collection[int] = (),
        masks: TokenMasks | None = None,
        proposes: bool = False,
        sharpness: Sharpness | None = None,
    ) -> None:
        self.params = params
        self.masks = masks
        self.proposes = proposes
        self.sharpness = sharpness
        self._num_ids = num_token_ids
        self._device = torch.device(device)
        self._prompt_mask: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            ids = torch.as_tensor(prompt_ids, dtype=torch.int64)
            mask = torch.zeros(num_token_ids, dtype=torch.bool)
            mask[ids] = True
            self._prompt_mask = to_device(mask, self._device)
        self._bias: torch.Tensor | None = None
        if params.logit_bias:
            bias = torch.zeros(num_token_ids, dtype=torch.float32)
            for token_id, value in params.logit_bias:
                bias[token_id] += value
            self._bias = to_device(bias, self._device)
        self._counts: torch.Tensor | None = None
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        if penalties != (1.0, 0.0, 0.0):
            self._counts = torch.zeros(num_token_ids, dtype=torch.int32, device=self._device)
        self._counted: list[int] = []  # the output ids counted in _counts
        self._end_ids: torch.Tensor | None = None  # int64, excluded by min_tokens
        if params.min_tokens > 0 and end_token_ids and masks is None:
            self._end_ids = to_device(sorted(end_token_ids), self._device)
        self._key = noise_key(params.seed, params.choice_index)
        self._noise: torch.Tensor | None = None  # float64 [rows, num_ids]
        self._noise_start = 0  # completion index of the first row of _noise

    def is_plain_greedy(self, first_index: int) -> bool:
        """Whether the rule is a bare argmax from ``first_index`` on, without noise, penalties, bias
        and excluded tokens."""
        return (
            self.params.temperature <= 0.0
            and self.masks is None
            and self._counts is None
            and self._bias is None
            and (self._end_ids is None or first_index >= self.params.min_tokens)
        )

    def choose_for_rows(
        self, logits: torch.Tensor, output_ids: Sequence[int], draft_ids: Sequence[int]
    ) -> torch.Tensor:
        """Returns token ids as int64 ``[rows]`` on the device, -1 for an unusable row; a draft's
        choices as ``propose_tokens`` does, flattened.

        ``logits`` are float32 ``[len(draft_ids) + 1, num_token_ids]``. Row k's history is
        ``output_ids`` and ``draft_ids[:k]``, so row k's token has the completion index
        ``len(output_ids) + k``. The sampler's ``masks`` must have been started for the same ids.
        """
        num_rows, width = logits.shape
        first_index = len(output_ids)
        assert width == self._num_ids, f"logits of {width} ids, expected {self._num_ids}"
        assert num_rows == len(draft_ids) + 1, "every row after the first follows a draft id"
        logits = penalise(
            self._without_excluded(logits, first_index),
            self.params,
            prompt_mask=self._prompt_mask,
            counts=None if self._counts is None else self._row_counts(output_ids, draft_ids),
            bias=self._bias,
        )
        noise = None
        if self.params.temperature > 0.0:
            noise = self._noise_for(first_index, num_rows)
        if not self.proposes:
            return choose_tokens(logits, self.params, noise=noise)
        place = 0 if self.sharpness is None else self.sharpness.place
        return propose_tokens(logits, self.params, sharpness_place=place, noise=noise).flatten()

    def _without_excluded(self, logits: torch.Tensor, first_index: int) -> torch.Tensor:
        """Returns the logits without the tokens that the grammar excludes, and without end tokens
        in the rows before ``min_tokens``."""
        if self.masks is not None:
            return mask_logits(logits, self.masks.take())
        num_early = min(self.params.min_tokens - first_index, logits.shape[0])
        if self._end_ids is None or num_early <= 0:
            return logits
        early = logits[:num_early].index_fill(1, self._end_ids, -math.inf)
        return torch.cat((early, logits[num_early:]))

    def _row_counts(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> torch.Tensor:
        """Updates ``_counts`` to ``output_ids`` by their difference to the counted ids; returns the
        counts of each row: int32 ``[len(draft_ids) + 1, num_ids]``."""
        assert self._counts is not None
        common = num_common(self._counted, output_ids)
        added = list(output_ids[common:])
        self._add_counts(self._counts, self._counted[common:], -1)
        self._add_counts(self._counts, added, 1)
        self._counted[common:] = added
        rows = range(1, len(draft_ids) + 1)
        places = [row * self._num_ids + each for row in rows for each in draft_ids[:row]]
        counts = self._counts.repeat(len(rows) + 1)
        self._add_counts(counts, places, 1)
        return counts.view(-1, self._num_ids)

    def _add_counts(self, counts: torch.Tensor, places: list[int], number: int) -> None:
        if places:
            each = torch.full((len(places),), number, dtype=torch.int32, device=self._device)
            counts.index_add_(0, to_device(places, self._device), each)

    def _noise_for(self, first_index: int, num_rows: int) -> torch.Tensor:
        """Returns the noise of ``num_rows`` indices from the cache, or computes some rows ahead."""
        offset = first_index - self._noise_start
        if self._noise is None or offset < 0 or offset + num_rows > self._noise.shape[0]:
            num_ahead = max(num_rows, _NOISE_ELEMENTS // self._num_ids)
            indices = range(first_index, first_index + num_ahead)
            noise = noise_rows(self._key, indices, self._num_ids, self._device)
            if num_ahead * self._num_ids > _KEPT_ELEMENTS:
                return noise
            self._noise, self._noise_start, offset = noise, first_index, 0
        return self._noise[offset : offset + num_rows]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sequence's part of a step: a row for the token after ``output_ids``, and a row for the
    token after each of ``draft_ids``; with log-probabilities of the ``num_top`` likeliest ids
    unless ``num_top`` is None."""

    sampler: TokenSampler
    output_ids: Sequence[int]
    draft_ids: Sequence[int] = ()
    num_top: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.draft_ids) + 1

    @property
    def num_chosen(self) -> int:
        """Number of ids and bits that the sampler returns."""
        if not self.sampler.proposes:
            return self.num_rows
        is_random = self.sampler.params.temperature > 0.0
        return self.num_rows * (_NUM_BEST + (len(SHARPNESSES) if is_random else 0))


RowNotes = list[Any]
"""Each row's TokenLogprobs, or a draft's Proposal; or empty."""


def sample_step(
    requests: Sequence[SampleRequest], logits: torch.Tensor
) -> list[tuple[list[int], RowNotes]]:
    """Returns each sequence's token ids and notes, with one wait for the device.

    ``logits`` are float32 ``[rows, num_token_ids]``, with the rows of the requests in order. Raises
    HippoError when a row's logits are unusable, and InvalidRequestError where a grammar fails.
    """
    chosen = choose_step(requests, logits)
    parts = [chosen]
    if any(request.num_top is not None for request in requests):
        rows = torch.split(logits, [request.num_rows for request in requests])
        ids = torch.split(chosen, [request.num_chosen for request in requests])
        for request, own_rows, own_ids in zip(requests, rows, ids, strict=True):
            if request.num_top is not None:
                parts += pack_logprobs(own_rows, own_ids, request.num_top)
    # One copy from the device: log-probabilities and scores travel as bits in the ids' int64.
    values = iter((torch.cat(parts) if len(parts) > 1 else chosen).tolist())
    chosen_values = [list(itertools.islice(values, request.num_chosen)) for request in requests]
    width = logits.shape[1]
    results: list[tuple[list[int], RowNotes]] = []
    for request, found in zip(requests, chosen_values, strict=True):
        notes: RowNotes = []
        if request.sampler.proposes:
            notes = unpack_proposals(found, request.num_rows)
            found = [proposal.token_id for proposal in notes]
        elif request.num_top is not None:
            notes = unpack_logprobs(values, request.num_rows, request.num_top, width)
        if min(found) < 0:
            raise HippoError(
                "the model's logits are not usable (NaN, plus infinity, or no finite value): the "
                "checkpoint is damaged, or its dtype is too narrow for it; try float32"
            )
        if request.sampler.masks is not None:
            request.sampler.masks.check(request.draft_ids, found)
        results.append((found, notes))
    return results


def unpack_proposals(values: Sequence[int], num_rows: int) -> list[Proposal]:
    """Reads the numbers of ``propose_tokens`` for ``num_rows`` rows; an unusable row has the id -1.

    Of two scores with the difference d, the second is the target's with probability
    ``1 / (1 + exp(d))``, as if the target chose among the two by the draft's probabilities.
    """
    width = len(values) // num_rows
    firsts, seconds = (floats(values[place::width]) for place in (2, 3))
    return [
        Proposal(
            values[begin] if math.isfinite(first) else -1,
            values[begin + 1],
            1 / (1 + math.exp(min(first - second, _MOST_ODDS))),
            tuple(values[begin + _NUM_BEST : begin + width]),
        )
        for begin, first, second in zip(range(0, len(values), width), firsts, seconds, strict=True)
    ]


def choose_step(requests: Sequence[SampleRequest], logits: torch.Tensor) -> torch.Tensor:
    """Returns what all requests' samplers return, int64 ``[numbers]`` on the device."""
    num_rows = [request.num_rows for request in requests]
    assert sum(num_rows) == logits.shape[0], "every row of logits belongs to a sequence"
    if all(request.sampler.is_plain_greedy(len(request.output_ids)) for request in requests):
        if all(request.sampler.proposes for request in requests):
            return propose_tokens(logits, SamplingParams()).flatten()
        if not any(request.sampler.proposes for request in requests):
            return choose_tokens(logits, SamplingParams())
    return torch.cat(
        [
            request.sampler.choose_for_rows(part, request.output_ids, request.draft_ids)
            for request, part in zip(requests, torch.split(logits, num_rows), strict=True)
        ]
    )
