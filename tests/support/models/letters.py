"""A small byte-level tokenizer, for grammars."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def letter_tokenizer(texts: Sequence[str], special: Sequence[str]) -> bytes:
    """Returns the tokenizer.json of tokens that stand for ``texts``, in this order; those of
    ``special`` among them are special tokens."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [level.pre_tokenize_str(text)[0][0] for text in texts]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = level
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in special])
    return core.to_str().encode()
