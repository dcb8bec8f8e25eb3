"""Conversion of what flows while a sequence runs: blocks, verdicts, commits and the like.

Apart from :mod:`hippo.rpc.convert` because these are built and read for every round.
"""

from __future__ import annotations

from hippo.errors import InvalidRequestError
from hippo.types import (
    Block,
    Commit,
    FinishReason,
    PromptInfo,
    Selection,
    Timing,
    TokenLogprobs,
    Verdict,
)
from hippo.v1 import common_pb2 as pb

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
# Each rejection raises the epoch, and it must fit its field for as long as a sequence can last.
MAX_EPOCH = 2**31
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}


def block_to_proto(block: Block) -> pb.Block:
    return pb.Block(
        epoch=block.epoch,
        start_index=block.start_index,
        token_ids=block.token_ids,
        is_exhausted=block.is_exhausted,
        step_ns=block.step_ns,
        wait_ns=block.wait_ns,
    )


def block_from_proto(message: pb.Block, *, num_token_ids: int | None = None) -> Block:
    """Raises InvalidRequestError for a block without ids that does not say that it is the last."""
    token_ids = tuple(message.token_ids)
    if token_ids:
        _check_ids(token_ids, num_token_ids)
    elif not message.is_exhausted:
        raise InvalidRequestError(
            "a block has no token ids; only one with is_exhausted may be empty",
            param="verify.token_ids",
        )
    return Block(
        checked_epoch(message.epoch, "verify.epoch"),
        message.start_index,
        token_ids,
        message.is_exhausted,
        message.step_ns,
        message.wait_ns,
    )


def commit_to_proto(commit: Commit) -> pb.Commit:
    return pb.Commit(epoch=commit.epoch, start_index=commit.start_index, token_ids=commit.token_ids)


def commit_from_proto(message: pb.Commit, *, num_token_ids: int | None = None) -> Commit:
    token_ids = tuple(message.token_ids)
    if not token_ids:
        raise InvalidRequestError("a commit has no token ids", param="commit.token_ids")
    _check_ids(token_ids, num_token_ids)
    epoch = checked_epoch(message.epoch, "commit.epoch")
    return Commit(epoch, message.start_index, token_ids)


def verdict_to_proto(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        epoch=verdict.epoch,
        start_index=verdict.start_index,
        token_ids=verdict.token_ids,
        num_draft_tokens=verdict.num_draft_tokens,
        num_accepted_tokens=verdict.num_accepted_tokens,
        is_rejection=verdict.is_rejection,
        num_dropped_tokens=verdict.num_dropped_tokens,
        finish_reason=_FINISH_REASONS[verdict.finish_reason],
        timing=timing_to_proto(verdict.timing),
        is_conservative=verdict.is_conservative,
        logprobs=[
            pb.TokenLogprobs(
                logprob=one.logprob,
                top=[
                    pb.TopLogprob(token_id=token_id, logprob=logprob)
                    for token_id, logprob in one.top
                ],
            )
            for one in verdict.logprobs
        ],
    )


def verdict_from_proto(message: pb.Verdict) -> Verdict:
    return Verdict(
        message.epoch,
        message.start_index,
        tuple(message.token_ids),
        message.num_draft_tokens,
        message.num_accepted_tokens,
        message.is_rejection,
        message.num_dropped_tokens,
        _FINISH_REASONS_BACK[message.finish_reason],
        timing_from_proto(message.timing),
        message.is_conservative,
        tuple(
            TokenLogprobs(one.logprob, tuple((each.token_id, each.logprob) for each in one.top))
            for one in message.logprobs
        ),
    )


def timing_to_proto(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue_ns=timing.queue_ns,
        forward_ns=timing.forward_ns,
        wait_ns=timing.wait_ns,
        num_rows=timing.num_rows,
        context_length=timing.context_length,
        num_sequences=timing.num_sequences,
        num_batch_rows=timing.num_batch_rows,
    )


def timing_from_proto(message: pb.Timing) -> Timing:
    return Timing(
        message.queue_ns,
        message.forward_ns,
        message.wait_ns,
        message.num_rows,
        message.context_length,
        message.num_sequences,
        message.num_batch_rows,
    )


def prompt_to_proto(prompt: PromptInfo) -> pb.Prompt:
    return pb.Prompt(
        prompt_hash=prompt.prompt_hash,
        num_prompt_tokens=prompt.num_prompt_tokens,
        num_visual_tokens=prompt.num_visual_tokens,
        queue_ns=prompt.queue_ns,
        preprocess_ns=prompt.preprocess_ns,
    )


def prompt_from_proto(message: pb.Prompt) -> PromptInfo:
    return PromptInfo(
        message.prompt_hash,
        message.num_prompt_tokens,
        message.num_visual_tokens,
        message.queue_ns,
        message.preprocess_ns,
    )


def selection_to_proto(selection: Selection) -> pb.Selection:
    return pb.Selection(
        kept_indices=selection.kept_indices,
        num_visual_tokens=selection.num_visual_tokens,
        score_ns=selection.score_ns,
    )


def selection_from_proto(message: pb.Selection) -> Selection:
    """Raises InvalidRequestError unless the indices ascend and are among the visual tokens."""
    kept = tuple(message.kept_indices)
    previous = -1
    for index in kept:
        if index <= previous:
            raise InvalidRequestError(
                f"kept_indices must ascend, but {index} follows {previous}",
                param="select.kept_indices",
            )
        previous = index
    if previous >= message.num_visual_tokens:
        raise InvalidRequestError(
            f"kept_indices holds {previous}, but there are {message.num_visual_tokens} visual "
            "tokens",
            param="select.kept_indices",
        )
    return Selection(kept, message.num_visual_tokens, message.score_ns)


def checked_epoch(epoch: int, field: str) -> int:
    """Raises InvalidRequestError for an epoch that no sequence comes to."""
    if epoch > MAX_EPOCH:
        raise InvalidRequestError(f"{field} is {epoch}; it is at most {MAX_EPOCH}", param=field)
    return epoch


def _check_ids(token_ids: tuple[int, ...], num_token_ids: int | None) -> None:
    if num_token_ids is not None and max(token_ids) >= num_token_ids:
        raise InvalidRequestError(
            f"token_ids holds {max(token_ids)}; the model's token ids are 0 to {num_token_ids - 1}",
            param="token_ids",
        )
