"""The tokens between which a model writes what it thinks before it answers."""

from collections.abc import Mapping
from typing import Any

BEGIN, END = "<think>", "</think>"


def thought_ids(added_tokens: Mapping[int, Any]) -> tuple[int, int] | None:
    """Returns the ids of both markers, of a tokenizer's added tokens; None if it lacks one."""
    ids = {token.content: token_id for token_id, token in added_tokens.items()}
    return (ids[BEGIN], ids[END]) if BEGIN in ids and END in ids else None
