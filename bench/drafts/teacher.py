"""The target's output along a guess, which saves time and changes nothing."""

from collections.abc import Sequence

from hippo.models.interface.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.sampling.sampler import TokenSampler

MAX_TOKENS = 256


def target_output(
    model: VideoLanguageModel,
    first_id: int,
    guess: Sequence[int],
    *,
    max_tokens: int,
    sampler: TokenSampler | None = None,
) -> tuple[int, ...]:
    """Returns the output after a prefill of slot 0, its end token included; greedy without a
    ``sampler``.

    ``guess`` (such as the true answer) only saves time; it is verified like draft tokens.
    """
    ends = model.info.end_token_ids
    output = [first_id]
    while output[-1] not in ends and len(output) < max_tokens:
        place = len(output)
        follows = guess[place:max_tokens] if list(guess[:place]) == output else ()
        rows = (output[-1], *follows)
        logits = model.forward(StepPlan((SequenceRows(0, place - 1, rows),)))
        chosen = (
            logits.argmax(-1)
            if sampler is None
            else sampler.choose_for_rows(logits, tuple(output), follows)
        )
        for said, guessed in zip(chosen.tolist(), (*follows, None), strict=True):
            output.append(said)
            if said != guessed or said in ends or len(output) == max_tokens:
                break
    return tuple(output)
