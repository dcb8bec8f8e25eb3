"""Checks whether a draft and a target can work together; without torch, for the gateway."""

from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.catalog.shapes import find_shape
from hippo.errors import IncompatiblePairError
from hippo.types import ModelInfo


def check_pair(draft: ModelInfo, target: ModelInfo) -> None:
    """Raises IncompatiblePairError unless the two services can speculate together.

    The check compares the tokenizers' id maps, not the vocabulary sizes of the configurations,
    because models of one family with one tokenizer may declare different sizes. A service of an
    earlier release does not tell its video_hash, which is then not compared.
    """
    if draft.protocol_version != target.protocol_version:
        raise IncompatiblePairError(
            f"draft {draft.name} speaks protocol version {draft.protocol_version}, target "
            f"{target.name} version {target.protocol_version}: update the older service"
        )
    if draft.tokenizer_hash != target.tokenizer_hash:
        raise IncompatiblePairError(
            f"draft {draft.name} and target {target.name} have different tokenizers "
            f"({draft.num_token_ids} and {target.num_token_ids} ids): a token id would not mean "
            f"the same to both; {_advice(target)}"
        )
    if draft.num_token_ids != target.num_token_ids:
        raise IncompatiblePairError(
            f"draft {draft.name} serves {draft.num_token_ids} token ids, target {target.name} "
            f"{target.num_token_ids}: they must be equal"
        )
    if draft.video_hash and target.video_hash and draft.video_hash != target.video_hash:
        raise IncompatiblePairError(
            f"draft {draft.name} and target {target.name} make different prompts of a video: "
            "their patch sizes, limits of frames or texts between frames differ "
            f"(preprocessor_config.json, video_preprocessor_config.json); {_advice(target)}"
        )


def _advice(target: ModelInfo) -> str:
    """Names the published models of the target's family that are smaller by a tenth or more, and
    think as it does, because their prompts differ otherwise; transformers calls a family's form
    with experts FAMILY_moe."""
    family = target.family.removesuffix("_moe")
    drafts = [
        name
        for name, config in PUBLIC_CONFIGS.items()
        if config["model_type"] == family
        and ("Thinking" in name) == ("Thinking" in target.name)
        and find_shape(name).num_parameters < 0.9 * target.num_parameters
    ]
    if not drafts:
        return f"choose a smaller model of the target's family ({target.family})"
    return f"published drafts of the target's family ({target.family}): {', '.join(drafts)}"
