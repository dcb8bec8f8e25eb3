"""Checks whether a draft and a target can work together; without torch, for the gateway."""

from __future__ import annotations

from hippo.errors import IncompatiblePairError
from hippo.types import ModelInfo


def check_pair(draft: ModelInfo, target: ModelInfo) -> None:
    """Raises IncompatiblePairError unless the two services can speculate together.

    The check compares the tokenizers' id maps, not the vocabulary sizes of the configurations,
    because models of one family with one tokenizer may declare different sizes.
    """
    if draft.protocol_version != target.protocol_version:
        raise IncompatiblePairError(
            f"draft {draft.name} speaks protocol version {draft.protocol_version}, target "
            f"{target.name} version {target.protocol_version}: update the older service"
        )
    if draft.tokenizer_hash != target.tokenizer_hash:
        raise IncompatiblePairError(
            f"draft {draft.name} and target {target.name} have different tokenizers "
            f"({draft.num_token_ids} and {target.num_token_ids} ids): a token id would not mean "
            "the same to both; choose two models of one family"
        )
    if draft.num_token_ids != target.num_token_ids:
        raise IncompatiblePairError(
            f"draft {draft.name} serves {draft.num_token_ids} token ids, target {target.name} "
            f"{target.num_token_ids}: they must be equal"
        )
