"""From chat messages to token ids, positions and the places of visual tokens."""
