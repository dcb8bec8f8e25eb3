"""The bundled checkpoints and clips: they load as any Qwen2.5-VL does, and see what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from demo.training.export import MODELS
from demo.training.inference import Asked, greedy, load
from demo.world import clips, texts

MEGABYTE = 1e6


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_checkpoint_is_loaded_as_a_hub_model_is_and_describes_a_clip(name: str) -> None:
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        str(MODELS / name), dtype=torch.float32
    )
    automatic: Any = AutoProcessor
    processor = automatic.from_pretrained(str(MODELS / name))
    path, facts = clips.sample_clips()[0]
    frames, rate = clips.read_mp4(path)
    content = [{"type": "video"}, {"type": "text", "text": facts.question}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    sampled = clips.sample_like_processor(frames, rate)
    inputs = processor(
        text=[prompt],
        videos=[torch.from_numpy(sampled).permute(0, 3, 1, 2)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    inputs["second_per_grid_ts"] = torch.tensor([1.0])
    assert (
        int((inputs["input_ids"] == model.config.video_token_id).sum()) == facts.num_visual_tokens
    )
    out = model.generate(**inputs, max_new_tokens=24)
    said = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert facts.answer.startswith("The video shows a")
    assert said.startswith("The video shows a")
    own = greedy(load(MODELS / name), Asked(sampled[None], [facts.question]), max_new_tokens=24)
    assert own[0] == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_target_describes_a_bundled_clip_correctly() -> None:
    target = load(MODELS / "target")
    path, facts = clips.sample_clips()[1]
    frames, rate = clips.read_mp4(path)
    sampled = clips.sample_like_processor(frames, rate)
    answer = greedy(target, Asked(sampled[None], [facts.question]))[0]
    said = set(texts.parse(str(target.tokenizer.decode(answer))))
    assert len(said & set(texts.parse(facts.answer))) >= 0.8 * len(said) > 0


@pytest.mark.parametrize(("kind", "least", "most"), [("short", 64, 128), ("long", 1000, 1200)])
def test_bench_clips_are_the_same_every_time_and_have_long_answers(
    tmp_path: Path, kind: Any, least: int, most: int
) -> None:
    first = clips.write_bench_clips(tmp_path / "a", num_clips=1, kind=kind, seed=7)
    again = clips.write_bench_clips(tmp_path / "b", num_clips=1, kind=kind, seed=7)
    assert first == again == clips.read_facts(tmp_path / "a")
    tokenizer = load(MODELS / "draft").tokenizer
    for facts in first:
        one = (tmp_path / "a" / facts.file).read_bytes()
        assert one == (tmp_path / "b" / facts.file).read_bytes()
        frames, rate = clips.read_mp4(tmp_path / "a" / facts.file)
        count = len(clips.sample_like_processor(frames, rate))
        assert count // 2 * (facts.height // 28) * (facts.width // 28) == facts.num_visual_tokens
        assert least <= facts.num_visual_tokens <= most
        assert len(tokenizer(facts.answer).input_ids) >= 100
