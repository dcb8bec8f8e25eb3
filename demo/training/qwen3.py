"""Makes a Qwen3-VL pair from the bundled pair: weights that fit are taken over, then trained on.

The tower learns the bundled tower's features, the language models the prompts with times and what
their layers lack: biases are dropped, queries and keys are normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.training import export, language, models, tower
from demo.training.batches import Encoder, sample_batch
from demo.training.inference import Loaded, load

if TYPE_CHECKING:
    from demo.training.run import Run

TIMED = replace(language.GROWN, name="timed", tokens=2500, stream=15)
TIMED_DROPPED = replace(language.SIZED_DROPPED, name="timed-dropped", tokens=2500, stream=16)
HEAD = 64
# Of the merger: Qwen2.5-VL's names and Qwen3-VL's.
_RENAMED = {
    "merger.ln_q.": "merger.norm.",
    "merger.mlp.0.": "merger.linear_fc1.",
    "merger.mlp.2.": "merger.linear_fc2.",
}


def encoder_of(bundled: Loaded) -> Encoder:
    """Returns the encoder for prompts with times, of the bundled pair's tokenizer."""
    return Encoder(bundled.tokenizer, bundled.encoder.special, is_timed=True)


def converted(bundled: Loaded) -> Any:
    """Returns a Qwen3-VL model with the bundled model's weights where their shapes are the same.

    The norms of queries and keys have the size of the bundled model's largest on a training batch:
    none attends less sharply than it did.
    """
    inner: Any = bundled.model
    source: dict[str, Tensor] = {}
    for name, value in inner.state_dict().items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        source[name] = value
    text = inner.config.text_config
    shape = models.DemoShape(text.num_hidden_layers, text.vocab_size, family="qwen3_vl")
    torch.manual_seed(0)
    model = models.build(shape, bundled.encoder.special)
    goal = model.state_dict()
    goal["model.visual.pos_embed.weight"] = torch.zeros_like(goal["model.visual.pos_embed.weight"])
    for name, value in goal.items():
        if name in source and source[name].shape == value.shape:
            goal[name] = source[name]
    for name, size in _head_sizes(bundled).items():
        goal[name] = torch.full_like(goal[name], size)
    model.load_state_dict(goal)
    return model


@torch.no_grad()
def _head_sizes(bundled: Loaded) -> dict[str, float]:
    """Returns the largest root mean square of queries and of keys, by name of the new norm."""
    inner: Any = bundled.model
    sizes: dict[str, float] = {}

    def watch(norm: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def record(module: nn.Module, inputs: Any, out: Tensor) -> None:
            sizes[norm] = float(out.view(-1, HEAD).pow(2).mean(-1).max().sqrt())

        return record

    handles = [
        getattr(layer.self_attn, f"{part}_proj").register_forward_hook(
            watch(f"model.language_model.layers.{number}.self_attn.{part}_norm.weight")
        )
        for number, layer in enumerate(inner.model.language_model.layers)
        for part in "qk"
    ]
    batch = sample_batch(TIMED, bundled.encoder, 0, 0)
    embeds, positions, _ = language.embed(
        inner, batch, bundled.encoder.special.video_pad, torch.float32
    )
    inner.model.language_model(inputs_embeds=embeds, position_ids=positions)
    for handle in handles:
        handle.remove()
    return sizes


def run_tower(run: Run) -> None:
    """The tower: a token's own features are the first eighth of the bundled tower's columns, those
    for the first layer bring the others, those for the second layer correct all; with half of the
    columns as its own, the answers hardly change without deepstack."""
    bundled = load(export.MODELS / "target")
    inner: Any = bundled.model
    teacher, visual = inner.model.visual, converted(bundled).model.visual
    is_first = torch.arange(models.HIDDEN) < models.HIDDEN // 8

    def loss_of(batch: tower.TowerBatch) -> tuple[Tensor, dict[str, float]]:
        frames = torch.from_numpy(batch.frames)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                goal = language.visual_features(teacher, frames).float()
            own = language.visual_features(visual, frames).float()
        sums = own.view(*goal.shape[:2], -1, models.HIDDEN).cumsum(-2).unbind(-2)
        size = goal.pow(2).mean()
        losses = [
            functional.mse_loss(ours, theirs) / size
            for ours, theirs in zip(sums, (goal * is_first, goal, goal), strict=True)
        ]
        figures = {f"missing{place}": float(loss.detach()) for place, loss in enumerate(losses)}
        return torch.stack(losses).sum(), figures

    draw = partial(tower.sample_batch, run.seed, patches=3200, sizes=tower.WIDER_SIZES, stream=14)
    tower.train_on_frames(
        {"visual": visual}, loss_of, run.folder, "tower", draw, 800, 2e-3, run.render_core, 0.5
    )


def _with_tower(run: Run, name: str) -> tuple[Any, Encoder]:
    visual = run.state("tower")["visual"]
    bundled = load(export.MODELS / name)
    model = converted(bundled)
    model.model.visual.load_state_dict(visual)
    return model, encoder_of(bundled)


def run_target(run: Run) -> None:
    """The target, on the true texts."""
    model, encoder = _with_tower(run, "target")
    language.train_language(
        model, [(TIMED, 80)], encoder, run.folder, "target",
        seed=run.seed, matrix_lr=1.5e-3, other_lr=1e-3, warmup=10, decay_share=0.5, save_every=10,
    )  # fmt: skip


def run_draft(run: Run) -> None:
    """The draft, on the true texts, with visual tokens dropped at random."""
    model, encoder = _with_tower(run, "draft")
    language.train_language(
        model, [(TIMED_DROPPED, 200)], encoder, run.folder, "draft",
        seed=run.seed + 1, matrix_lr=2e-3, other_lr=1.5e-3, warmup=20, decay_share=0.5,
    )  # fmt: skip


def run_export(run: Run) -> None:
    """Both checkpoints, in the run's folder."""
    for name in ("target", "draft"):
        bundled = load(export.MODELS / name)
        model = converted(bundled)
        model.load_state_dict(run.state(name)["model"])
        export.export(model, bundled.tokenizer, bundled.encoder.special, run.folder / "pair" / name)


STAGES: Mapping[str, Callable[[Run], None]] = {
    "tower": run_tower,
    "target": run_target,
    "draft": run_draft,
    "export": run_export,
}
