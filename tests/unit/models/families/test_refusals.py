"""Checkpoints of the families with frames of one size that cannot work are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hippo.errors import ModelLoadError
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model

LLAVA, INTERNVL = "llava_checkpoint", "internvl_checkpoint"
CONFIG, PROCESSOR = "config.json", "processor_config.json"
TEXT, WHOLE = ("text_config",), ()
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 3,
}
ROTARY = {"rope_theta": 10000.0, "factor": 2.0, "rope_type": "dynamic"}
DYNAMIC = {"max_position_embeddings": 255, "rope_parameters": ROTARY}


@pytest.mark.parametrize(
    ("checkpoint", "file", "place", "values", "said"),
    [
        (LLAVA, CONFIG, TEXT, WINDOWS, "sliding window of 128"),
        (LLAVA, CONFIG, TEXT, {"model_type": "llama"}, "language model is a 'llama'"),
        (LLAVA, CONFIG, WHOLE, {"vision_feature_select_strategy": "default"}, "'default' is not"),
        (LLAVA, PROCESSOR, WHOLE, {"num_image_tokens": 729}, "counts 729 tokens .* gives 25"),
        (LLAVA, PROCESSOR, ("video_processor",), {"size": {"shortest_edge": 9}}, "frames of size"),
        (INTERNVL, CONFIG, TEXT, {"model_type": "gpt_oss"}, "supported with 'qwen2' or 'qwen3'"),
        (INTERNVL, CONFIG, TEXT, DYNAMIC, r"rotary positions \('dynamic'\) .* at most 255"),
        (INTERNVL, CONFIG, WHOLE, {"downsample_ratio": 0.25}, r"ratio 0\.25 .*, only 0\.5"),
        (INTERNVL, CONFIG, WHOLE, {"vision_feature_select_strategy": "full"}, "'full' is not"),
        (INTERNVL, PROCESSOR, WHOLE, {"image_seq_length": 256}, "256 tokens a frame .* gives 4"),
        (INTERNVL, PROCESSOR, ("image_processor", "size"), {"height": 56}, "makes tiles of size"),
        (INTERNVL, PROCESSOR, ("video_processor", "size"), {"height": 56}, "makes frames of size"),
    ],
)
def test_a_checkpoint_that_cannot_work_is_refused(
    checkpoint: str,
    file: str,
    place: tuple[str, ...],
    values: dict[str, Any],
    said: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(checkpoint), tmp_path / "copy"))
    content = json.loads((folder / file).read_text())
    changed = content
    for key in place:
        changed = changed[key]
    changed.update(values)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        load_model(LoadPlan(str(folder), max_context_length=256))
