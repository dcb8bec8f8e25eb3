"""``hippo up``: runs draft, target and gateway on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields, replace

from rich.console import Console
from rich.markup import escape

from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores
from hippo.models.plan import QUANTIZATION_NAMES

_COLOURS = {"draft": "cyan", "target": "magenta", "gateway": "green"}
_WATCH_S = 0.2
_NAME_COLUMN = 16  # where text log lines have the service's name

HELP = "start draft, target and gateway on this machine"
DESCRIPTION = "Starts draft, target and gateway on this machine and stops them on Ctrl-C."
EXAMPLES = """\
examples:
  hippo up                                  the bundled pair, on the CPU
  hippo up --port 0                         any free port
  hippo up --target-model Qwen/Qwen2.5-VL-32B-Instruct --target-device cuda:0 \\
           --draft-model Qwen/Qwen2.5-VL-7B-Instruct --draft-device cuda:1
                                            two GPUs of 80 GB
  hippo up --target-model Qwen/Qwen2.5-VL-72B-Instruct --target-quantization nf4 \\
           --target-device cuda:0 --draft-model Qwen/Qwen2.5-VL-7B-Instruct --draft-device cuda:1
  hippo up --allowed-local-media-path /data/clips      requests may name /data/clips/FILE

On a CPU with two cores or more, the target gets one core, draft and gateway share another.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    add_stack_arguments(parser, port=8000)


def add_stack_arguments(
    parser: argparse.ArgumentParser, *, port: int, has_models: bool = True
) -> None:
    """Adds the options about the services that `hippo up`, `hippo demo` and `hippo distill` share;
    without ``has_models`` those of the checkpoints are the command's own."""
    group = parser.add_argument_group("services")
    for role in ("target", "draft"):
        if has_models:
            group.add_argument(
                f"--{role}-model",
                default=str(BUNDLED_PAIR / role),
                metavar="MODEL",
                help=f"{role} checkpoint: folder or hub name (default: the bundled pair's)",
            )
        group.add_argument(
            f"--{role}-device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N"
        )
        group.add_argument(
            f"--{role}-quantization",
            choices=QUANTIZATION_NAMES,
            help=f"quantise the layers of a plain {role} checkpoint while it is read",
        )
        group.add_argument(
            f"--{role}-core", type=int, metavar="CORE", help=f"pin the {role} to this CPU core"
        )
        group.add_argument(
            f"--{role}-port", type=int, default=0, metavar="PORT", help="default: any free one"
        )
        group.add_argument(
            f"--{role}-arg",
            action="append",
            dest=f"{role}_args",
            default=[],
            metavar="FLAG",
            help=f"further flag for the {role} service, as --{role}-arg=--slots=8; repeatable",
        )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="the target's, and a draft's that is not on a CPU (default: float32 if all runs on "
        "the CPU, where it makes outputs exactly equal to the target's own; else auto, the "
        "checkpoint's)",
    )
    group.add_argument(
        "--draft-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="the draft's dtype, which affects only the speed (default: --dtype; on a CPU auto)",
    )
    group.add_argument(
        "--max-context-length",
        type=int,
        metavar="TOKENS",
        help="most tokens of prompt and answer together (default: as many as a checkpoint allows "
        "and fit in memory)",
    )
    group.add_argument(
        "--allowed-local-media-path",
        default="",
        metavar="DIR",
        help="directories, separated by commas, whose files requests may name by path",
    )
    group.add_argument("--no-pin", action="store_true", help="pin nothing to cores by default")
    group.add_argument("--served-name", default="hippo", metavar="NAME", help="model name in REST")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument(
        "--port", type=int, default=port, help="the gateway's port (default: %(default)s)"
    )
    group.add_argument(
        "--gateway-arg",
        action="append",
        dest="gateway_args",
        default=[],
        metavar="FLAG",
        help="further flag for the gateway; repeatable",
    )


def stack_options(arguments: argparse.Namespace) -> StackOptions:
    """Returns the StackOptions for the arguments."""
    cores: tuple[int | None, int | None] = (None, None)
    on_cpu = arguments.target_device == arguments.draft_device == "cpu"
    if any(flag.startswith("--tensor-parallel") for flag in arguments.target_args):
        on_cpu = on_cpu and not any("cuda" in flag for flag in arguments.target_args)
    elif not arguments.no_pin:
        cores = default_cores(arguments.target_device, arguments.draft_device)
    names = {field.name for field in fields(StackOptions)}
    options = StackOptions(**{key: value for key, value in vars(arguments).items() if key in names})
    return replace(
        options,
        dtype=arguments.dtype or ("float32" if on_cpu else "auto"),
        target_core=cores[0] if arguments.target_core is None else arguments.target_core,
        draft_core=cores[1] if arguments.draft_core is None else arguments.draft_core,
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or until a process ends."""
    console = Console(stderr=True)
    with Stack(stack_options(arguments), log_printer(console)) as stack:
        try:
            bring_up(stack, console)
            console.print(
                f"[bold green]ready[/] at [bold]{stack.url}[/]; Ctrl-C stops it. Open it, or:\n"
                f'  hippo ask VIDEO "What happens?" --url {stack.url}',
                highlight=False,
            )
            while True:
                stack.check_running()
                time.sleep(_WATCH_S)
        except KeyboardInterrupt:
            console.print("stopping ...")
            stack.stop()
            console.print("stopped")
            return 0


def bring_up(stack: Stack, console: Console) -> None:
    """Starts the stack with a progress display. Raises StackError if it does not get ready."""
    started = time.monotonic()
    with console.status("starting draft and target ...") as status:

        def show(waiting_for: str) -> None:
            elapsed_s = time.monotonic() - started
            status.update(f"{escape(waiting_for)} [dim]({elapsed_s:.0f} s)[/]")

        stack.start()
        stack.wait_ready(on_wait=show)


def log_printer(console: Console) -> Callable[[str, str], None]:
    """Returns a function that prints a process's log line after the process's name."""

    def print_line(name: str, line: str) -> None:
        column, coloured = f" {name:7} ", f" [{_COLOURS[name]}]{name:7}[/] "
        before, has_name, after = line.partition(column)
        if has_name and len(before) <= _NAME_COLUMN:  # one of our own log lines
            text = escape(before) + coloured + escape(after)
        else:
            text = f"{'':{_NAME_COLUMN}}{coloured}{escape(line)}"
        console.print(text, highlight=False, soft_wrap=True)

    return print_line


def quiet(name: str, line: str) -> None:
    """Ignores a log line; errors quote the last lines anyway."""
