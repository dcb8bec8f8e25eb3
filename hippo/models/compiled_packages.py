"""The packages of compiled layers that a folder keeps.

A package (hippo.models.compiled_layer) is kept under a name that says all it depends on, and a
later start only loads it. Of processes that need the same one at the same time, one makes it, and
the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hippo.models.compiled_layer import LayerSpec, Run, compile_layer, load_layer

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # for another process that makes what this one needs too
_MOST_KEPT = 64  # packages in a folder, of 2 MB each
_PARTIAL = ".making-"  # what a folder is called in which a package is made
_ABANDONED_S = 3600.0


def load_kept(spec: LayerSpec, folder: Path) -> Run | None:
    """The layer's code, if ``folder`` has it; a damaged file is removed."""
    path = folder / spec.name()
    if not path.exists():
        return None
    try:
        run = load_layer(path)
    except Exception as error:
        _log.warning("%s cannot be loaded and is compiled again: %s", path, error)
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # what is in use is not swept
    return run


def make_package(spec: LayerSpec, folder: Path, *, patience_s: float = _PATIENCE_S) -> Path:
    """Has ``folder`` keep the layer's code, made here or meanwhile by another process: the file.

    One that takes longer than ``patience_s`` is not waited for.

    Raises what torch, the compiler or the file system raise.
    """
    path = folder / spec.name()
    folder.mkdir(parents=True, exist_ok=True)
    with _making(path, patience_s):
        if path.exists():
            return path
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder, prefix=_partial(path)) as partial:
            made = compile_layer(spec, Path(partial) / "layer.pt2")
            os.replace(made, path)  # whole or not at all
        _log.info("compiled a layer in %.0f s", time.monotonic() - began)
    _sweep(folder)
    return path


def _sweep(folder: Path) -> None:
    """Removes the packages that have not been loaded for longest, beyond _MOST_KEPT, and what
    processes left that were ended while they compiled."""
    with contextlib.suppress(OSError):
        packages = sorted(folder.glob("layer-*.pt2"), key=lambda package: package.stat().st_mtime)
        for package in packages[:-_MOST_KEPT]:
            package.unlink()
        for left in (*folder.glob(f"{_PARTIAL}*"), *folder.glob("layer-*.lock")):
            if left.stat().st_mtime < time.time() - _ABANDONED_S:
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()


@contextlib.contextmanager
def _making(path: Path, patience_s: float) -> Iterator[None]:
    """Waits, for a while, until no other process makes the package; none does till the block ends,
    unless one took longer. What one left that was ended meanwhile is removed."""
    lock_path = path.with_suffix(".lock")
    deadline = time.monotonic() + patience_s
    with lock_path.open("w") as lock:
        if not (is_ours := _locked(lock)):
            _log.info("another process compiles the same layer; waiting for it")
        while not is_ours and time.monotonic() < deadline:
            time.sleep(0.1)
            is_ours = _locked(lock)
        if is_ours:
            for left in path.parent.glob(f"{_partial(path)}*"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            yield
        finally:
            if is_ours:  # who waited finds the package, or makes it where this process could not
                lock_path.unlink(missing_ok=True)


def _partial(path: Path) -> str:
    """How the names of folders begin in which that package is made."""
    return f"{_PARTIAL}{path.stem}-"


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
