"""A stopped stage of training ends bit for bit as one that was not; bundled checkpoints."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from demo import train
from demo.training import batches, language, loop, models, tower
from demo.training.batches import Encoder
from demo.training.export import MODELS
from demo.training.inference import Asked, greedy, load
from demo.world import clips, texts
from demo.world.sizes import Size

SHAPE = models.DemoShape(num_layers=1, vocab_size=512)
RECIPE = batches.Recipe(
    "tiny", (Size(112, 112, 2, 1.0, 3),), tokens=400, is_still=True, drop_share=0.5
)


class _Stop(Exception):
    pass


def train_tiny(encoder: Encoder, folder: Path, *, stop_after: int | None = None) -> dict[str, Any]:
    """Four steps of a small language model; returns its weights."""
    torch.manual_seed(0)
    model = models.build(SHAPE, encoder.special)
    plan = [(RECIPE, 4)]
    with pytest.MonkeyPatch.context() as patch:
        if stop_after is not None:
            steps = iter(range(stop_after))

            def draw(*arguments: Any) -> Any:
                if next(steps, None) is None:
                    raise _Stop
                return batches.sample_batch(*arguments)

            patch.setattr(language, "sample_batch", draw)
        try:
            language.train_language(model, plan, encoder, folder, "tiny", save_every=2)
        except _Stop:
            assert stop_after is not None
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.nightly
def test_a_resumed_stage_of_the_language_model_equals_one_that_was_never_stopped(
    encoder: Encoder, tmp_path: Path
) -> None:
    whole = train_tiny(encoder, tmp_path / "whole")
    train_tiny(encoder, tmp_path / "broken", stop_after=3)
    assert not (tmp_path / "broken" / "tiny.done").exists()
    resumed = train_tiny(encoder, tmp_path / "broken")
    assert (tmp_path / "broken" / "tiny.done").exists()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_resumed_stage_equals_one_that_was_never_stopped(tmp_path: Path) -> None:
    """Its parts, momentum included, and the chance of each step."""

    def train(folder: Path, *, stop_before: int | None = None) -> torch.Tensor:
        torch.manual_seed(0)
        part = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)

        def step(index: int) -> dict[str, float]:
            if index == stop_before:
                raise _Stop
            optimizer.zero_grad()
            loss = part(torch.randn(5, 3)).square().sum()
            loss.backward()
            optimizer.step()
            return {"loss": float(loss.detach())}

        parts: dict[str, loop.Stateful] = {"part": part, "optimizer": optimizer}
        with contextlib.suppress(_Stop):
            loop.run_steps("stage", folder, num_steps=7, parts=parts, step=step, save_every=2)
        return part.weight.detach()

    whole = train(tmp_path / "whole")
    train(tmp_path / "broken", stop_before=5)
    assert not (tmp_path / "broken" / "stage.done").exists()
    assert torch.equal(train(tmp_path / "broken"), whole)
    assert (tmp_path / "broken" / "stage.done").exists()


def test_labels_of_the_dense_loss_name_the_object_under_each_patch() -> None:
    batch = tower.sample_batch(0, 5, patches=600)
    num_pairs, _, height, width, _ = batch.frames.shape
    assert batch.labels.shape == (num_pairs, height * width // 196, len(tower.HEADS))
    for head, (_, classes) in enumerate(tower.HEADS):
        values = batch.labels[..., head]
        assert values.max() < classes
        assert set(values[values < 0].tolist()) <= {tower.IGNORE}
    again = tower.sample_batch(0, 5, patches=600)
    assert (again.frames == batch.frames).all() and (again.labels == batch.labels).all()


def test_a_stage_names_the_stage_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--run", str(tmp_path), "--stages", "target"]
    monkeypatch.setattr("sys.argv", ["demo.train", *options])
    with pytest.raises(SystemExit, match="--stages tower"):
        train.main()


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
