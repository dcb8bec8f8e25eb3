"""The training's own batched forwards against transformers, its pixels against the processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from demo.training import batches, export, growth, language, models
from demo.training.batches import Batch, Encoder
from demo.training.fast import tower_features
from demo.training.language import answer_logits
from demo.world import clips, pixels
from demo.world.sizes import Size
from demo.world.texts import Exchange
from hippo.models.interface.base import DecodedMedia
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaPart, TextPart

SHAPE = models.DemoShape(num_layers=2, vocab_size=512)


@pytest.fixture(scope="module")
def batch(encoder: Encoder) -> Batch:
    """A small training batch of clips."""
    recipe = batches.Recipe("tiny", (Size(112, 140, 8, 1.0, 4),), tokens=700)
    return batches.sample_batch(recipe, encoder, 0, 1)


def video_inputs(batch: Batch, row: int) -> dict[str, torch.Tensor]:
    """The same row as transformers' forward takes it."""
    time, rows, cols = batch.size.grid
    return {
        "pixel_values_videos": pixels.patchify(torch.from_numpy(batch.frames[row : row + 1]))[
            0
        ].flatten(0, 1),
        "video_grid_thw": torch.tensor([[time, 2 * rows, 2 * cols]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }


@pytest.mark.parametrize("frame_rate", clips.FRAME_RATES)
def test_frames_are_sampled_as_the_processor_samples_them(frame_rate: int) -> None:
    total = 6 * frame_rate
    processor = Qwen2VLVideoProcessor(fps=2.0)
    metadata = VideoMetadata(total_num_frames=total, fps=float(frame_rate))
    indices = processor.sample_frames(metadata, temporal_patch_size=2, fps=2.0)
    marks = np.arange(total, dtype=np.uint8)[:, None, None, None]
    own = clips.sample_like_processor(marks, float(frame_rate))
    assert own.ravel().tolist() == indices.tolist()


def test_the_tower_and_the_whole_forward_equal_transformers(encoder: Encoder, batch: Batch) -> None:
    torch.manual_seed(0)
    model = models.build(SHAPE, encoder.special)
    pad = encoder.special.video_pad
    with torch.no_grad():
        logits, _ = answer_logits(model, batch, pad, torch.float32)
        start = 0
        for row in range(len(batch.frames)):
            ids = torch.from_numpy(
                batch.sequences.ids[row : row + 1, : batch.sequences.lengths[row]]
            )
            inputs = video_inputs(batch, row)
            rows, cols = (int(side) for side in inputs["video_grid_thw"][0, 1:])
            patches = inputs["pixel_values_videos"].view(batch.size.grid[0], rows * cols, -1)
            own = tower_features(model.model.visual, patches, rows, cols).flatten(0, 1)
            theirs = model.model.visual(
                inputs["pixel_values_videos"], grid_thw=inputs["video_grid_thw"]
            )
            assert torch.allclose(own, theirs.pooler_output, atol=1e-5)
            out = model(input_ids=ids, mm_token_type_ids=(ids == pad).int() * 2, **inputs).logits[0]
            places = torch.from_numpy(batch.sequences.labels[row, : ids.shape[1]]) >= 0
            end = start + int(places.sum())
            assert torch.allclose(out[places], logits[start:end], atol=1e-4)
            start = end


def test_dropped_tokens_leave_the_others_positions_as_they_were(
    encoder: Encoder, batch: Batch
) -> None:
    pad = encoder.special.video_pad
    rng = np.random.default_rng(0)
    select = batches.keep_some(batch.sequences, 7, pad, rng)
    model = models.build(SHAPE, encoder.special)
    thinned = Batch(batch.size, batch.frames, batch.sequences, select)
    embeds, positions, labels = language.embed(model, thinned, pad, torch.float32)
    whole, all_positions, all_labels = language.embed(model, batch, pad, torch.float32)
    row = torch.from_numpy(select[0])
    assert embeds.shape[1] == whole.shape[1] - batch.size.num_visual + 7
    assert torch.equal(positions[:, 0], all_positions[:, 0, row])
    assert torch.equal(embeds[0], whole[0, row])
    assert (labels >= 0).sum() == (all_labels >= 0).sum()


def test_a_grown_model_computes_the_same(encoder: Encoder, batch: Batch) -> None:
    torch.manual_seed(0)
    shallow = models.build(SHAPE, encoder.special)
    deep = growth.grow(shallow, models.DemoShape(num_layers=5, vocab_size=512), encoder.special)
    pad = encoder.special.video_pad
    with torch.no_grad():
        before, _ = answer_logits(shallow, batch, pad, torch.float32)
        after, _ = answer_logits(deep, batch, pad, torch.float32)
    assert torch.allclose(before, after, atol=1e-5)
    assert growth.depth_map(2, 5) == [0, None, 1, None, None]


@pytest.mark.parametrize("is_video_first", [True, False])
def test_an_exported_model_sees_in_hippo_what_it_was_trained_on(
    trained: Any, encoder: Encoder, batch: Batch, is_video_first: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = models.build(SHAPE, encoder.special)
    export.export(model, trained, encoder.special, tmp_path)
    served = load_model(LoadPlan(str(tmp_path), dtype="float32"))
    frames = torch.from_numpy(batch.frames[0])
    seconds = tuple(place / 2 for place in range(len(frames)))
    parts: tuple[MediaPart | TextPart, ...] = (MediaPart(0), TextPart("What is it?"))
    message = ChatMessage("user", parts if is_video_first else parts[::-1])
    media = [DecodedMedia(MediaKind.VIDEO, frames, seconds, 2.0)]
    prompt = served.prepare_prompt([message], media, FramePlan())
    row = encoder.conversation(
        [Exchange("", "What is it?", "")],
        grid=batch.size.grid,
        is_video_first=is_video_first,
        open_end=True,
    )
    assert prompt.input_ids.tolist() == row[0]
    own = batches.positions_of(np.array(row[0]), batch.size.grid, encoder.special.video_pad)
    assert np.array_equal(prompt.positions.numpy(), own)
    features = language.visual_features(
        model.to(torch.bfloat16).float().model.visual, torch.from_numpy(batch.frames[:1])
    )
    seen = served.embed_visual(prompt)
    assert seen is not None and torch.allclose(seen, features[0], atol=1e-4)
