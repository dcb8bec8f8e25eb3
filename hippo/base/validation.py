"""Range checks of request values for the gateway and the services; standard library only."""

from hippo.errors import InvalidRequestError
from hippo.types import SamplingParams

MAX_TEMPERATURE = 2.0
MAX_SEED = 2**64 - 1
MAX_CHOICE_INDEX = 2**32 - 1
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**32 - 1
MAX_GRAMMAR_LENGTH = 2**15  # letters; a JSON schema takes time to compile by the square of its size


def validate_sampling(
    params: SamplingParams, *, num_token_ids: int | None = None, max_tokens: int | None = None
) -> None:
    """Checks the range of every field. Checks token ids of biases against ``num_token_ids``, and
    ``min_tokens`` against ``max_tokens``, unless these are None.

    Raises InvalidRequestError with the field, the value and the allowed range.
    """
    _check("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_whole("top_k", params.top_k, 2**31 - 1)
    _check("top_p", params.top_p, 0.0, 1.0, is_open=True)
    _check("min_p", params.min_p, 0.0, 1.0)
    _check("repetition_penalty", params.repetition_penalty, 0.01, 10.0)  # or logits overflow
    _check("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_whole("seed", params.seed, MAX_SEED)
    _check_whole("choice_index", params.choice_index, MAX_CHOICE_INDEX)
    _check_whole("min_tokens", params.min_tokens, MAX_TOKENS)
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens ({max_tokens})",
            param="min_tokens",
        )
    if len(params.grammar) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(
            f"the grammar has {len(params.grammar):,} letters; at most {MAX_GRAMMAR_LENGTH:,} are "
            "allowed",
            param="sampling.grammar",
        )
    _check_biases(params.logit_bias, num_token_ids)


def _check_biases(biases: tuple[tuple[int, float], ...], num_token_ids: int | None) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} entries; at most {MAX_LOGIT_BIASES} are allowed",
            param="logit_bias",
        )
    largest = 2**31 - 1 if num_token_ids is None else num_token_ids - 1
    seen: set[int] = set()
    for token_id, bias in biases:
        _check("logit_bias", bias, -100.0, 100.0)
        if not _is_number(token_id, int):
            fault = f"{token_id!r}; token ids are whole numbers"
        elif not 0 <= token_id <= largest:
            fault = f"{token_id}; token ids are 0 to {largest}"
        elif token_id in seen:
            fault = f"{token_id} twice"
        else:
            seen.add(token_id)
            continue
        raise InvalidRequestError(f"logit_bias names token {fault}", param="logit_bias")


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check(name: str, value: float, least: float, most: float, *, is_open: bool = False) -> None:
    """Requires a number from ``least`` (excluded if ``is_open``) to ``most``; NaN is an error."""
    is_in = _is_number(value, int, float) and least <= value <= most
    if not is_in or (is_open and value == least):
        start = f"greater than {least:g} and at most" if is_open else f"{least:g} to"
        raise InvalidRequestError(f"{name} is {value!r}; it must be {start} {most:g}", param=name)


def _check_whole(name: str, value: int, most: int) -> None:
    if not _is_number(value, int) or not 0 <= value <= most:
        raise InvalidRequestError(
            f"{name} is {value!r}; it must be a whole number from 0 to {most}", param=name
        )
