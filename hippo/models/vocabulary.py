"""What a checkpoint's tokenizer says about ids: its hash, how many there are, which end a text."""

from __future__ import annotations

import hashlib
from typing import Any

from hippo.errors import ModelLoadError


def tokenizer_hash(tokenizer: Any) -> bytes:
    """SHA-256 over the tokenizer's id map: equal for models that share ids, whatever
    ``vocab_size`` they declare."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(int(token_id).to_bytes(8, "little"))
    return digest.digest()


def num_token_ids(tokenizer: Any, vocab_size: int) -> int:
    """One more than the tokenizer's largest id: what logits are cut to."""
    count = 1 + max(tokenizer.get_vocab().values())
    if count > vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {count} ids but the model only {vocab_size}: they are not of one "
            "checkpoint"
        )
    return int(count)


def end_token_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the generation configuration's, else the tokenizer's."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
