"""A model as its service describes it, for what needs no more of it."""

from hippo.types import ModelInfo


def small_model_info() -> ModelInfo:
    """100 token ids, of which 98 and 99 end an answer; a context of 1000."""
    return ModelInfo(
        name="hippo",
        family="toy",
        device="cpu",
        dtype="float32",
        tokenizer_hash=b"",
        tokenizer_json=b"",
        num_token_ids=100,
        end_token_ids=(98, 99),
        max_context_length=1000,
        num_slots=1,
        num_parameters=1,
    )
