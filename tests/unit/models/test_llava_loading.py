"""Loading LLaVA-OneVision: what is served, and what is said when it cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.errors import ModelLoadError
from hippo.models.base import SequenceRows, StepPlan
from hippo.models.linear import has_half_linear
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.pair import check_pair
from tests.support.reference import clip, prefill, prepare, user


def step(*ids: int) -> StepPlan:
    return StepPlan((SequenceRows(0, 0, ids),))


def test_logits_are_cut_to_the_tokenizers_ids(
    llava_checkpoint: Path, llava_draft_checkpoint: Path
) -> None:
    target, padded = (
        load_model(LoadPlan(str(folder), max_context_length=256))
        for folder in (llava_checkpoint, llava_draft_checkpoint)
    )
    check_pair(padded.info, target.info)
    assert padded.info.num_token_ids == target.info.num_token_ids == 265
    assert padded.info.family == "llava_onevision"
    assert prefill(padded, 0, prepare(target, user(0, "what?"), clip())).shape == (265,)
    assert padded.forward(step(5, 6)).shape == (2, 265)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_narrower_weights_stay_near_float32(
    llava_checkpoint: Path, dtype: str, limit: float
) -> None:
    if dtype == "float16" and not has_half_linear():
        pytest.skip("this torch has no fbgemm")
    results = []
    for name in ("float32", dtype):
        model = load_model(LoadPlan(str(llava_checkpoint), dtype=name, max_context_length=256))
        assert model.info.dtype == name
        first = prefill(model, 0, prepare(model, user(0, "what?"), clip()))
        results.append(torch.cat((first[None], model.forward(step(5, 6, 7)))))
    difference = (results[0] - results[1]).norm() / results[0].norm()
    assert 0 < difference < limit


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        (
            "config.json",
            {
                "text_config": {
                    "use_sliding_window": True,
                    "sliding_window": 128,
                    "layer_types": ["sliding_attention"] * 3,
                }
            },
            "sliding window of 128",
        ),
        ("config.json", {"text_config": {"model_type": "llama"}}, "language model is a 'llama'"),
        ("config.json", {"vision_feature_select_strategy": "default"}, "'default' is not supp"),
        ("processor_config.json", {"num_image_tokens": 729}, "counts 729 tokens .* gives 25"),
        (
            "processor_config.json",
            {"video_processor": {"size": {"shortest_edge": 38}}},
            "frames of size",
        ),
    ],
)
def test_a_checkpoint_that_cannot_work_is_refused(
    llava_checkpoint: Path, tmp_path: Path, file: str, values: dict[str, Any], said: str
) -> None:
    path = Path(shutil.copytree(llava_checkpoint, tmp_path / "copy")) / file
    config = json.loads(path.read_text())
    for key, value in values.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=said):
        load_model(LoadPlan(str(path.parent), max_context_length=256))
