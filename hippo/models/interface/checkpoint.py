"""Finds or downloads a checkpoint, and checks its files before weights are read.

A name stands for a folder or for a Hugging Face repository, which is downloaded to the usual
cache (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT apply).
"""

import importlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hippo.errors import ModelLoadError

Progress = Callable[[str, float], None]
"""Called with the stage ("downloading", "loading", ...) and the share of the stage that is done."""

_CONFIG = "config.json"
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint folder."""

    name: str
    folder: Path
    config: dict[str, Any]
    num_floats: int  # stored numbers in float32, bfloat16 or float16; tied weights count once
    num_packed_bytes: int  # all other stored tensors, which only quantised checkpoints have

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers."""
        return str(self.config.get("model_type", ""))


Check = Callable[[Checkpoint], None]
"""Called with a checkpoint before its weights are downloaded and counted; raises ModelLoadError for
one that cannot be served."""


def find_checkpoint(
    name_or_path: str, *, progress: Progress, check: Check = lambda _checkpoint: None
) -> Checkpoint:
    """Finds or downloads a checkpoint and checks that its files are complete.

    Raises ModelLoadError for a checkpoint that is missing, gated, unreachable, damaged or refused
    by ``check``.
    """
    folder, name = Path(name_or_path).expanduser(), name_or_path
    is_here = folder.is_dir()
    if is_here:
        name = folder.resolve().name
    elif folder.exists() or name_or_path.startswith((".", "/", "~")) or _depth(name_or_path) > 1:
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise ModelLoadError(
            f"model folder {name_or_path!r} {reason}; give a folder with config.json, or the name "
            "of a Hugging Face repository such as Qwen/Qwen2.5-VL-7B-Instruct"
        )
    else:
        folder = _download(name, [_CONFIG], lambda _stage, _share: None)
    checkpoint = Checkpoint(name, folder, _read_json(folder / _CONFIG), 0, 0)
    check(checkpoint)
    if not is_here:
        folder = _download(name, _PATTERNS, progress)
    num_floats, num_packed_bytes = _count_stored(folder)
    return replace(
        checkpoint, folder=folder, num_floats=num_floats, num_packed_bytes=num_packed_bytes
    )


def _depth(name: str) -> int:
    return name.strip("/").count("/")


def _download(name: str, patterns: list[str], progress: Progress) -> Path:
    """Downloads the files of a repository that have a name of ``patterns``; returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    progress("downloading", 0.0)
    try:
        folder = snapshot_download(
            name, allow_patterns=patterns, tqdm_class=_progress_bar(progress)
        )
    except HFValidationError as error:
        raise ModelLoadError(
            f"{name!r} is neither a folder here nor a valid repository name: {error}"
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name} and set HF_TOKEN "
            "to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{name!r} is neither a folder here nor a repository on the Hugging Face hub (or it "
            "is private: then set HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _http_failure(name, error.__cause__) from error
        raise ModelLoadError(
            f"{name} is not in the local cache and the Hugging Face hub cannot be reached (or "
            "HF_HUB_OFFLINE is set): download it where there is a network, or give a folder"
        ) from error
    except HfHubHTTPError as error:
        raise _http_failure(name, error) from error
    except OSError as error:  # no network, no space
        raise ModelLoadError(f"downloading {name} failed: {error}") from error
    progress("downloading", 1.0)
    return Path(folder)


def _http_failure(name: str, error: Any) -> ModelLoadError:
    status = error.response.status_code
    if status in (401, 403):
        return ModelLoadError(
            f"access to {name} was refused ({status}): set HF_TOKEN to a token that may read it"
        )
    reason = str(error).partition("\n")[0]
    return ModelLoadError(f"downloading {name} failed with HTTP status {status}: {reason}")


def _progress_bar(progress: Progress) -> Any:
    """Returns a replacement for tqdm that reports the share of bytes done and prints nothing."""
    tqdm: Any = importlib.import_module("tqdm.auto").tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                progress("downloading", min(1.0, self.n / self.total))

    return Bar


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{path.parent} has no {path.name}: it is not a checkpoint folder"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def _count_stored(folder: Path) -> tuple[int, int]:
    """Returns Checkpoint.num_floats and num_packed_bytes by the weight files' headers.

    Raises ModelLoadError.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        files = ["model.safetensors"]
    num_floats = num_packed_bytes = 0
    for name in files:
        path = folder / name
        if not path.exists():
            raise ModelLoadError(
                f"{folder} lacks the weight file {name}; weights must be in safetensors form"
            )
        for dtype, count in _tensors_in(path):
            if dtype in ("F32", "BF16", "F16"):
                num_floats += count
            else:
                num_packed_bytes += count * _item_bits(dtype) // 8
    return num_floats, num_packed_bytes


def _tensors_in(path: Path) -> list[tuple[str, int]]:
    """Returns dtype (by its name in safetensors) and number of items of each tensor in a file."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [file.get_slice(name) for name in file.keys()]
            return [(each.get_dtype(), math.prod(each.get_shape())) for each in slices]
    except SafetensorError as error:
        raise ModelLoadError(
            f"{path} is damaged or cut short ({path.stat().st_size:,} bytes): fetch it again"
        ) from error


def _item_bits(dtype: str) -> int:
    """Returns the bits of an item from the dtype's name in safetensors, as F8_E4M3 or BOOL."""
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8
