"""The synthetic world: scenes, clips of them, texts about them, and the tokenizer."""
