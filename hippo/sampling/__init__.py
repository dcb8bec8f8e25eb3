"""The token rule: logits, parameters, history and seed in, token ids out.

    token(i) = argmax(filter(penalise(logits_i, history) / T) + gumbel(key, i, id))

The noise is a pure function of seed, choice, completion index and token id, so a draft and a
target that share a seed draw with the same noise, and the output never depends on the draft.
"""

from hippo.sampling.logprobs import sample_with_logprobs
from hippo.sampling.noise import gumbel_noise, noise_key, row_words
from hippo.sampling.rule import choose_tokens, keep_mask, penalise
from hippo.sampling.sampler import SampleRequest, TokenSampler, sample_step

__all__ = [
    "SampleRequest",
    "TokenSampler",
    "choose_tokens",
    "gumbel_noise",
    "keep_mask",
    "noise_key",
    "penalise",
    "row_words",
    "sample_step",
    "sample_with_logprobs",
]
