"""The token rule, which chooses token ids by logits, parameters, history and seed.

    token(i) = argmax(filter(penalise(mask(logits_i, history), history) / T) + gumbel(key, i, id))

The noise is a pure function of seed, choice, completion index and token id. So a draft and a target
with the same seed use the same noise, and the output does not depend on the draft.
"""
