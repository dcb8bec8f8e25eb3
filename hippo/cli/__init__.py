"""The command line, ``hippo COMMAND``.

Each command is a module of its name, here or in ``hippo.lab.commands``, with the texts ``HELP``,
``DESCRIPTION`` and ``EXAMPLES``, ``add_options(parser)``, and ``run(arguments)``, which returns the
exit code.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from hippo.errors import HippoError

# By name, because what serves imports nothing of the lab.
_MODULES = (
    *("hippo.cli.up", "hippo.cli.ask", "hippo.cli.caption", "hippo.lab.commands.bench"),
    *("hippo.cli.demo", "hippo.lab.commands.distill", "hippo.cli.doctor"),
    *("hippo.lab.commands.inspect", "hippo.lab.commands.questions"),
    *("hippo.lab.commands.simulate", "hippo.lab.commands.sizes"),
)

_DESCRIPTION = """\
Answers questions about videos with a large (target) and a small (draft) model: the small one
proposes tokens, the large one checks several at once. The answer is the large model's own, token
for token; only faster.
"""

_EXAMPLES = """\
examples:
  hippo demo                                    everything at once: start, ask, measure, stop
  hippo up                                      serve the bundled pair at http://127.0.0.1:8000
  hippo ask clip.mp4 "What happens?"            ask about a file
  hippo ask clip.mp4 "What happens?" --compare  ... and measure against the target alone
  hippo caption videos --prompt "..." --out c.jsonl   ... about every video of a folder
  hippo bench --concurrency 1,8                 measure a running server, of any make
  hippo distill --target T --draft D ...        train your own draft on your target's answers
  hippo questions mvbench ...                   make a benchmark's file for hippo bench --questions
  hippo doctor http://127.0.0.1:8000            what a running pair's figures say
  hippo inspect clip.mp4 --out kept.png         draw which visual tokens the draft sees
  hippo simulate --pair qwen-7b-72b             predict the speedup on GPUs not at hand
  hippo sizes --all                             memory of public pairs, and where they fit

`hippo COMMAND --help` explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hippo",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in map(importlib.import_module, _MODULES):
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run)
        module.add_options(command)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(arguments.run(arguments))
    except HippoError as error:
        Console(stderr=True).print(f"error: {error.message}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `hippo ask ... | head`
        sys.stderr.close()
        return 141


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Makes SIGTERM end a command as Ctrl-C does, so that the command stops its processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
