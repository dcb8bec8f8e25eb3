"""Which visual tokens the draft sees: scores of tokens, and strategies that select by them."""
