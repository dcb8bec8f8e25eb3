"""The token rule: logits, parameters, history and seed in, token ids out.

    token(i) = argmax(filter(penalise(logits_i, history) / T) + gumbel(key, i, id))

The noise is a pure function of seed, choice, completion index and token id, so a draft and a
target that share a seed draw with the same noise, and the output never depends on the draft.
"""
