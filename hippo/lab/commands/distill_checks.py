"""What ``hippo distill`` checks before any work: the checkpoints, and the folder that it fills."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hippo.errors import InvalidRequestError
from hippo.lab.distill.student import tokenizer_of
from hippo.models.interface.checkpoint import Checkpoint, find_checkpoint
from hippo.models.load import FAMILIES
from hippo.models.loading.pretrained import tokenizer_hash

_SETTINGS = "distill.json"
_TRAINED = ("draft", "after.json")  # made with the weights of OUT/training
_PARTIAL = ".partial"  # the suffix of a file until it is whole


def fitting_draft(target: str, draft: str, progress: Console) -> Checkpoint:
    """Returns the draft's checkpoint. Raises InvalidRequestError if it is quantised, not of the
    target's family or of another vocabulary, and ModelLoadError if it is incomplete."""
    with progress.status("looking at the checkpoints ...") as status:

        def show(stage: str, share: float) -> None:
            status.update(f"{stage} {share:.0%} ...")

        theirs, own = (find_checkpoint(each, progress=show) for each in (target, draft))
        for checkpoint in (theirs, own):
            if checkpoint.model_type not in FAMILIES:
                raise InvalidRequestError(
                    f"{checkpoint.name} is of architecture {checkpoint.model_type!r}; supported: "
                    f"{', '.join(sorted(FAMILIES))}"
                )
        if _family(theirs) != _family(own):
            raise InvalidRequestError(
                f"the draft {own.name} is a {own.model_type}, the target {theirs.name} a "
                f"{theirs.model_type}: the draft is a smaller checkpoint of the target's family"
            )
        if own.config.get("quantization_config"):
            raise InvalidRequestError(
                f"the draft {own.name} is quantised: give the checkpoint that it was made of"
            )
        if tokenizer_hash(tokenizer_of(theirs.folder)) != tokenizer_hash(tokenizer_of(own.folder)):
            raise InvalidRequestError(
                f"the vocabularies of {own.name} and {theirs.name} differ: no token of the draft "
                "could be accepted; take a draft with the target's tokenizer"
            )
    return own


def _family(checkpoint: Checkpoint) -> str:
    return checkpoint.model_type.removesuffix("_moe")  # experts change neither prompts nor tower


def resolved(model: str) -> str:
    """Returns a model's folder without links, or its name on the hub."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def claim_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Makes the folder, or checks that an earlier run with the same settings made it. Raises
    InvalidRequestError."""
    path = out / _SETTINGS
    if path.exists():
        check_same(path, settings, "give the same options, or another --out")
        return
    left = path.with_suffix(_PARTIAL)  # by a stop
    if out.exists() and (not out.is_dir() or any(each != left for each in out.iterdir())):
        raise InvalidRequestError(
            f"--out: {out} has other content (no {_SETTINGS}): give a new folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    except OSError as error:
        raise InvalidRequestError(f"--out: {out} cannot be written: {error.strerror}") from None


def parts_of_training(out: Path) -> str:
    """Returns what is deleted to train again."""
    return ", ".join(str(out / name) for name in ("training", *_TRAINED))


def check_trained(out: Path) -> None:
    """Raises InvalidRequestError if a draft or its figures are there without their training."""
    left = [out / name for name in _TRAINED if (out / name).exists()]
    if left and not (out / "training" / "settings.json").exists():
        raise InvalidRequestError(
            f"{left[0]} exists without the training that made it: delete "
            f"{parts_of_training(out)} to train again"
        )


def check_same(path: Path, settings: Mapping[str, Any], advice: str) -> None:
    """Raises InvalidRequestError, with advice, if the settings of an earlier run were others."""
    found, wanted = read_json(path), json.loads(json.dumps(settings))
    differing = [f"{name} {found.get(name)}" for name in wanted if found.get(name) != wanted[name]]
    if differing:
        raise InvalidRequestError(f"{path.parent} was made with {', '.join(differing)}: {advice}")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file. Raises InvalidRequestError if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read ({error}): delete it") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object to a file, whole or not at all."""
    partial = path.with_suffix(_PARTIAL)
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
