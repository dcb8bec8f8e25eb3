"""Measures hippo on a machine with a GPU, part by part: ``python -m bench.gpu``.

    python -m bench.gpu --part steps --out DIR    one part
    python -m bench.gpu --part steps --part serve --small    a short trial, also without a GPU

    steps       Qwen2.5-VL-7B's and 3B's shapes: prefills and steps over their floors
    serve       7B with 3B through services and gateway, by policy and acceptance; memory
    steps-32b   as steps, with 32B's shape
    serve-32b   as serve, 32B with 3B
    products    the products of a layer of 72B: plain, nf4, int8
    steps-72b   as steps, with 72B's shape in nf4
    serve-72b   as serve, 72B in nf4 with 3B

Each part ends within --seconds, and names what it had no time for. The report (gpu.json, gpu.md in
--out) is written after each figure, and parts of earlier runs stay in it, so that parts can run one
by one, and a killed part keeps its figures. Nothing is downloaded. Weights are random, of the
published shapes (bench/shapes/random_pair.py), and are written to --work: 24 GB for 7B with 3B, 75
GB for 32B with 3B, 52 GB for 72B with 3B. It needs the packages of pyproject.toml's dependencies
and "engine"; products and 72b also need "quantized".
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.base.options import integers, parser_of
from bench.gpu.parts import PARTS, run_parts

STEP_KINDS = ("eager", "graphs")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; returns 1 if one failed, 2 if no CUDA device is here."""
    return run_parts(_parse(argv))


def _roomiest() -> Path:
    """Returns the folder for temporary files, or /dev/shm if it has more room."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return max(filter(Path.is_dir, folders), key=lambda folder: shutil.disk_usage(folder).free)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.gpu", __doc__)
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, dest="parts", help="repeatable; default: all")
    add("--small", action="store_true", help="small models, clips and numbers, for a trial")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --small")
    add("--steps", choices=STEP_KINDS, help="eager ones or CUDA graphs; default: both")
    add("--contexts", type=integers, help="cached tokens of the parts steps, as 1024,8192")
    add("--frames", type=integers, help="frames of each clip of the parts serve, as 10,84")
    add("--seconds", type=float, default=540.0, help="time of each part")
    add("--work", type=Path, default=_roomiest(), help="where weights are written for the run")
    add("--keep", action="store_true", help="keep the weights in WORK/hippo-gpu for the next run")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "bench/out/gpu")))
    args = parser.parse_args(argv)
    args.parts = args.parts or list(PARTS)
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu needs --small")
    return args


if __name__ == "__main__":
    sys.exit(main())
