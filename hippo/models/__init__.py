"""A model of any family, behind one interface.

Each room imports only from the rooms above it:

    interface   what a model is to an engine (``base``), and what is to be loaded (``plan``)
    products    matrix products with fixed weights, on one device and over several ranks
    quantized   quantised weights: their forms, and the kernels that multiply them packed
    attention   the KV cache in place, attention over it, states, and the scores of visual tokens
    runners     the decoder layers, and who runs them: eager, exact rows, CUDA graphs
    loading     dtype, form and memory of a checkpoint, then its weights
    prompts     chat messages and media to token ids and positions
    families    each family's prompt and vision tower

``cached.CachedModel`` puts them together, and ``load.load_model`` makes one from a checkpoint.
"""
