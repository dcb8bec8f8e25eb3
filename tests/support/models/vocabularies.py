"""Small tokenizers of the kinds that models have, and texts whose letters take several tokens."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = "<|im_end|>"
# Emoji, one of several code points, a letter with combining marks, Tibetan, Thai, and plain ones.
LETTERS = ("🎈", "👩‍🚀", "e\u0301\u0323", "བོད་", "ไทย", "€", "é", " the", "a", "\n")


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and one special token after them."""
    return _byte_level(sorted(pre_tokenizers.ByteLevel.alphabet()))


def crossing_tokenizer() -> Tokenizer:
    """Besides the bytes, tokens that begin within one letter and end within the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((name, _),) = level.pre_tokenize_str("".join(LETTERS) * 2)
    crossing = {name[start : start + size] for size in (2, 3, 4) for start in range(len(name))}
    return _byte_level([*alphabet, *sorted(crossing - set(alphabet))])


def _byte_level(names: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with their space as SentencePiece writes it, and a token for each other byte."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    names += ["<unk>", "▁", "▁the", "the", "▁a", "a", "b", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Whole words, which are joined by spaces."""
    names = ["one", "two", "é", "🎈", "?"]
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?")
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer
