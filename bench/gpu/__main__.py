"""Measures hippo on a machine with a GPU, part by part: ``python -m bench.gpu``.

    python -m bench.gpu --list                    the parts, and what is missing here
    python -m bench.gpu --part tests --out DIR    one part
    python -m bench.gpu --part steps --part serve --small    a short trial, also without a GPU

    tests       the files of tests that need a CUDA device
    bundled     the bundled pair: all policies, eager and with CUDA graphs, on one and on two GPUs
    steps       Qwen2.5-VL-7B's and 3B's shapes: prefills and steps over their floors
    serve       7B with 3B through services and gateway, by policy and acceptance; memory
    steps-32b   as steps, with 32B's shape
    serve-32b   as serve, 32B with 3B
    forms       steps of 8 layers of 72B's shape: plain, nf4, int8, FP8
    products    the products of a layer of 72B: plain, nf4, int8
    steps-72b   as steps, with 72B's shape in nf4
    serve-72b   as serve, 72B in nf4 with 3B

Each part ends within --seconds; what it had no time for, it names. The report (gpu.json, gpu.md in
--out) is written after each figure, and parts of earlier runs stay in it, so that parts can run one
by one, and a killed part keeps its figures. Nothing is downloaded. Weights are random, of the
published shapes (bench/shapes/random_pair.py), and are written to --work: 24 GB for 7B with 3B, 75
GB for 32B with 3B, 52 GB for 72B with 3B. Needed are the packages of pyproject.toml (dependencies
and "engine"; for forms and 72b "quantized"), and for the tests pytest, pytest-asyncio,
pytest-timeout and hypothesis.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from bench.base.options import integers, parser_of

PARTS = (
    "tests",
    "bundled",
    "steps",
    "serve",
    "steps-32b",
    "serve-32b",
    "forms",
    "products",
    "steps-72b",
    "serve-72b",
)
STEP_KINDS = ("eager", "graphs")
_TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; returns 1 if one failed or was left out, 2 if packages are missing."""
    args = _parse(argv)
    missing = missing_packages()
    if args.list:
        sys.stdout.write((__doc__ or "").partition("\n\n")[2])
    if missing:
        sys.stdout.write(f"not installed here: {', '.join(missing)}\n")
    if args.list or missing:
        return 2 if missing and not args.list else 0
    from bench.gpu.parts import run_parts  # imports the packages

    return run_parts(args)


def missing_packages() -> list[str]:
    """Returns the requirements that are not installed, or in another version."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["engine"], *_TEST_PACKAGES]
    return [
        text
        for text in texts
        if not ((need := Requirement(text)).marker and not need.marker.evaluate())
        and not _is_installed(need)
    ]


def _is_installed(need: Requirement) -> bool:
    try:
        version = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return need.specifier.contains(version, prereleases=True)


def _roomiest() -> Path:
    """Returns the folder for temporary files, or /dev/shm if it has more room."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return max(filter(Path.is_dir, folders), key=lambda folder: shutil.disk_usage(folder).free)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.gpu", __doc__)
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, dest="parts", help="repeatable; default: all")
    add("--list", action="store_true", help="list the parts and the missing packages")
    add("--small", action="store_true", help="small models, clips and numbers, for a trial")
    add("--device", default="cuda", help="kind of device: cuda or cpu (only with --small)")
    add("--steps", choices=STEP_KINDS, help="eager ones or CUDA graphs; default: both")
    add("--contexts", type=integers, help="cached tokens of the parts steps, as 1024,8192")
    add("--frames", type=integers, help="frames of each clip of the parts serve, as 10,84")
    add("--seconds", type=float, default=540.0, help="time of each part")
    add("--work", type=Path, default=_roomiest(), help="where weights are written for the run")
    add("--keep", action="store_true", help="keep the weights in WORK/hippo-gpu for the next run")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "bench/out/gpu")))
    args = parser.parse_args(argv)
    args.parts = args.parts or list(PARTS)
    if args.device not in ("cuda", "cpu"):
        parser.error(f"--device {args.device}: use cuda or cpu")
    if args.device == "cpu" and not args.small:
        parser.error(
            "--device cpu needs --small; `python -m bench.shapes.real_shapes` is for a CPU"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
