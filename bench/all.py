"""Runs every latency and load benchmark of the bundled pair, then writes the page.

    python -m bench.all                       all: 25 to 45 minutes on two idle cores
    python -m bench.all --list                lists the commands
    python -m bench.all --only short,load     some of them

The page contains all files in bench/out, from this run or an earlier one; --no-publish does not
write it. Run nothing else on the machine meanwhile.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from bench.base.environment import ROOT
from bench.base.options import names, parser_of

OUT = ROOT / "bench/out"
BENCHMARKS: Mapping[str, str] = {
    "short": "bench --kinds short --dtypes float32,bfloat16 --temperatures 0,0.8",
    "half": "bench --kinds short --dtypes float16",
    "long": "bench --kinds long --dtypes float32,bfloat16 --temperatures 0,0.8 --num-clips 6 "
    "--systems serialγ=10,vpsd,adaptive",
    "random": "bench --kinds short --dtypes float32 --draft-model random --systems adaptive "
    "--repeats 3 --num-clips 8",
    "load": "bench.load --rounds 2",
    "load-bfloat16": "bench.load --dtype bfloat16 --clients 1,8 --systems target-only,adaptive",
    "load-long": "bench.load --kind long --clients 1,8 --systems target-only,adaptive "
    "--num-clips 12 --answers 12 --rounds 1",
}
"""Modules and their arguments, by the name of the result."""


def command_of(name: str) -> list[str]:
    """Returns the arguments of ``python -m`` for a benchmark."""
    out = (OUT / f"{name}.json").relative_to(ROOT)
    return [*shlex.split(BENCHMARKS[name]), "--out", str(out)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen benchmarks and writes the page; returns the first non-zero exit code."""
    args = _parse(argv)
    commands = [command_of(name) for name in args.only or BENCHMARKS]
    if args.publish:
        commands.append(["bench.pages.results"])
    console = Console()
    for command in commands:
        console.rule(f"python -m {shlex.join(command)}", align="left", style="dim")
        if not args.list:
            done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
            if done.returncode:
                return done.returncode
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.all", __doc__)
    add = parser.add_argument
    add("--only", type=names, default=[], help=", ".join(BENCHMARKS))
    add("--list", action="store_true", help="run nothing")
    add("--publish", action=argparse.BooleanOptionalAction, default=True, help="write the page")
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(BENCHMARKS):
        parser.error(
            f"--only: no {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
