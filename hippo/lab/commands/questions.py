"""``hippo questions``: makes a file for ``hippo bench --questions`` from a published benchmark."""

import argparse
import json
import shlex
from pathlib import Path

from rich.console import Console

from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.converters import BENCHMARKS, convert
from hippo.lab.commands.options import write_text

HELP = "make a file of questions from a published benchmark"
DESCRIPTION = """\
Makes a file for `hippo bench --questions` from the annotation files that a benchmark's authors
publish and a folder of its videos. Nothing is downloaded. Questions without a video are left out.
"""
EXAMPLES = (
    """\
examples:
  hippo questions video-mme --annotations test-00000-of-00001.parquet --videos data --out v.jsonl
  hippo questions mvbench --annotations json/*.json --videos video --out mvbench.jsonl
  hippo bench --questions mvbench.jsonl --videos video --answers mvbench.answers.jsonl

the annotation files, by their names on the Hugging Face hub:
"""
    + "".join(f"  {name:22}{each.files}\n" for name, each in BENCHMARKS.items())
    + """
Prompts come from the authors and from lmms-eval. Subtitles are not used. Captions and summaries
(VideoDetailCaption, two tasks of MLVU) have no answer in the file, because a model must judge them.
MVBench asks some questions about a part of a video: take the videos of its revision `video`, which
are cut. LVBench's videos are named by their key.
"""
)
_MOST_NAMED = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS, metavar="BENCHMARK", help=", ".join(BENCHMARKS))
    add("--annotations", type=Path, nargs="+", required=True, metavar="FILE", help="see below")
    add("--videos", type=Path, required=True, metavar="FOLDER", help="searched with its folders")
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL, a question per line")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file; returns the exit code."""
    benchmark = BENCHMARKS[arguments.benchmark]
    lines, missing = convert(benchmark, arguments.annotations, arguments.videos)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if missing:
        more = len(missing) - _MOST_NAMED
        names = ", ".join(missing[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        console.print(f"{len(missing)} videos are not below {arguments.videos}: {names}")
    if not lines:
        raise InvalidRequestError(
            f"no video of these annotations is below {arguments.videos}: nothing is written"
        )
    write_text(arguments.out, "".join(json.dumps(line) + "\n" for line in lines))
    num_videos = len({line["video"] for line in lines})
    console.print(f"{len(lines)} questions about {num_videos} videos: {arguments.out}")
    command = ["hippo", "bench", "--questions", str(arguments.out)]
    command += ["--videos", str(arguments.videos)]
    command += ["--answers", str(arguments.out.with_suffix(".answers.jsonl"))]
    console.print(f"ask them: {shlex.join(command)}")
    return 0
