"""Trains the bundled pair: `python -m demo.train --help`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo.training import distill, export, growth, language, models, tokenizer, tower
from demo.training.batches import Encoder
from demo.training.inference import Loaded

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

ABOUT = """\
Trains the bundled target and draft from scratch on the synthetic world, in stages:

  tower      the vision tower alone, with a dense loss on the content of each patch;
             both models use it, frozen
  shallow    a target of 4 layers on stills, then on clips
  target     the same, grown to 20 layers without changing its function, on clips of all sizes
  plain      a draft of 2 layers on the true texts, visual tokens dropped at random:
             the undistilled draft
  widen      the tower again, at a low rate, with frames of up to 336 pixels a side
  settle     the target on that tower, for a few steps
  outputs    the target's own greedy answers about new clips
  draft      the draft, distilled: those answers, and the target's distribution over the next token
  export     both checkpoints in bfloat16, as standard Hugging Face folders

Every stage saves its state every 100 steps or more often, and resumes from it: to continue, run the
same command again. A finished stage is skipped; to repeat it, delete its files in the run folder.
On two cores, target and draft stages can run in parallel:
`taskset -c 0 python -m demo.train --stages shallow,target` and
`taskset -c 1 python -m demo.train --stages plain`.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The folder, seed and settings of a training run."""

    folder: Path
    seed: int
    render_core: int | None

    def state(self, name: str) -> dict[str, Any]:
        """Returns the saved state of a finished stage. Raises SystemExit if it has not run."""
        if not (self.folder / f"{name}.done").exists():
            command = f"python -m demo.train --stages {name}"
            raise SystemExit(f"stage {name!r} has not been run: {command}")
        state: dict[str, Any] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return state


def pair_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer, trained at the first call and then read from the run folder."""
    from transformers import AutoTokenizer

    folder = run.folder / "tokenizer"
    if not folder.exists():
        tokenizer.train_tokenizer().save_pretrained(str(folder))
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    return loaded


def encoder_of(run: Run) -> Encoder:
    """Returns the encoder of the run's tokenizer."""
    trained = pair_tokenizer(run)
    return Encoder(trained, tokenizer.special_ids(trained))


def new_model(run: Run, shape: models.DemoShape) -> "nn.Module":
    """Returns a new model of this shape with the trained tower."""
    torch.manual_seed(run.seed)
    model: Any = models.build(shape, encoder_of(run).special)
    model.model.visual.load_state_dict(run.state("tower")["visual"])
    new: nn.Module = model
    return new


SHALLOW = models.DemoShape(num_layers=4, vocab_size=models.TARGET.vocab_size)


def new_tower() -> "nn.Module":
    """Returns an untrained vision tower."""
    ids = models.SpecialIds(0, 1, 2, 3, 4, 5)
    visual: nn.Module = models.build(models.DemoShape(1, 64), ids).model.visual
    return visual


def run_tower(run: Run) -> None:
    torch.manual_seed(run.seed)
    visual = new_tower()
    torch.manual_seed(run.seed)
    tower.train_tower(
        visual, tower.Probe(models.HIDDEN), run.folder, "tower",
        partial(tower.sample_batch, run.seed),
        num_steps=2700, rate=3e-3, render_core=run.render_core,
    )  # fmt: skip


def run_shallow(run: Run) -> None:
    plan = [(language.STILLS, 220), (language.CLIPS, 380), (language.SIZED, 400)]
    language.train_language(
        new_model(run, SHALLOW), plan, encoder_of(run), run.folder, "shallow",
        seed=run.seed, decay_share=0.3,
    )  # fmt: skip


def run_plain(run: Run) -> None:
    plan = [(language.STILLS, 300), (language.DROPPED, 600), (language.SIZED_DROPPED, 700)]
    language.train_language(
        new_model(run, models.DRAFT), plan, encoder_of(run), run.folder, "plain",
        seed=run.seed + 1, decay_share=0.3,
    )  # fmt: skip


def run_target(run: Run) -> None:
    encoder = encoder_of(run)
    shallow = new_model(run, SHALLOW)
    shallow.load_state_dict(run.state("shallow")["model"])
    torch.manual_seed(run.seed)
    model = growth.grow(shallow, models.TARGET, encoder.special)
    language.train_language(
        model, [(language.GROWN, 300)], encoder, run.folder, "target",
        seed=run.seed, matrix_lr=1e-3, other_lr=5e-4, warmup=20, decay_share=0.5, save_every=20,
    )  # fmt: skip


def run_widen(run: Run) -> None:
    state = run.state("tower")
    visual, probe = new_tower(), tower.Probe(models.HIDDEN)
    visual.load_state_dict(state["visual"])
    probe.load_state_dict(state["probe"])
    draw = partial(tower.sample_batch, run.seed, sizes=tower.WIDER_SIZES, stream=12)
    tower.train_tower(
        visual, probe, run.folder, "widen", draw,
        num_steps=350, rate=6e-4, render_core=run.render_core,
    )  # fmt: skip


def with_wider_tower(run: Run, shape: models.DemoShape, stage: str) -> "nn.Module":
    """Returns the model of a finished stage with the widened tower."""
    model = new_model(run, shape)
    model.load_state_dict(run.state(stage)["model"])
    inner: Any = model
    inner.model.visual.load_state_dict(run.state("widen")["visual"])
    return model


def run_settle(run: Run) -> None:
    model = with_wider_tower(run, models.TARGET, "target")
    language.train_language(
        model, [(language.SETTLED, 80)], encoder_of(run), run.folder, "settle",
        seed=run.seed, matrix_lr=5e-4, other_lr=2e-4, warmup=10, decay_share=0.7, save_every=20,
    )  # fmt: skip


def run_outputs(run: Run) -> None:
    target = new_model(run, models.TARGET)
    target.load_state_dict(run.state("settle")["model"])
    trained = pair_tokenizer(run)
    distill.write_outputs(
        Loaded(target.to(torch.bfloat16).eval(), trained, encoder_of(run)),
        run.folder,
        num_batches=56,
        seed=run.seed,
    )


def run_draft(run: Run) -> None:
    draft = with_wider_tower(run, models.DRAFT, "plain")
    distill.train_draft(draft, encoder_of(run), run.folder, num_steps=700, seed=run.seed)


def run_export(run: Run) -> None:
    trained = pair_tokenizer(run)
    for name, stage, shape in (
        ("target", "settle", models.TARGET),
        ("draft", "draft", models.DRAFT),
        ("undistilled", "plain", models.DRAFT),
    ):
        model = new_model(run, shape)
        model.load_state_dict(run.state(stage)["model"])
        export.export(model, trained, encoder_of(run).special, export.MODELS / name)


STAGES: dict[str, Callable[[Run], None]] = {
    "tower": run_tower,
    "shallow": run_shallow,
    "target": run_target,
    "plain": run_plain,
    "widen": run_widen,
    "settle": run_settle,
    "outputs": run_outputs,
    "draft": run_draft,
    "export": run_export,
}


def main() -> None:
    """Run the stages chosen on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.train",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=Path(".demo-train"),
        help="folder for the training state (default: %(default)s)",
    )
    parser.add_argument("--stages", help="which stages to run, in order (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of this process")
    parser.add_argument(
        "--render-core", type=int, default=None, help="pin the tower stage's renderer to this core"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = Run(arguments.run, arguments.seed, arguments.render_core)
    names = arguments.stages.split(",") if arguments.stages else list(STAGES)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    for name in names:
        STAGES[name](run)


if __name__ == "__main__":
    main()
