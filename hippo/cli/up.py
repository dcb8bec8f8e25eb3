"""``hippo up``: runs draft, target and gateway on this machine until Ctrl-C."""

import argparse
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from hippo.cli.processes import ProcessEndedError, StackError
from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores
from hippo.models.interface.plan import DTYPE_NAMES, QUANTIZATION_NAMES

_COLOURS = {"draft": "cyan", "target": "magenta", "gateway": "green"}
_WATCH_S = 0.2
_NAME_COLUMN = 16  # where text log lines have the service's name
_FIRST_PAUSE_S = 1.0  # before a draft that has ended is started again
_LONGEST_PAUSE_S = 60.0
_WITHOUT_HELPER = ("--tensor-parallel", "--deterministic", "--prefill-helper")
_GPU_NODES = ("/dev/nvidia0", "/dev/nvidiactl")

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

Models load and download for as long as that takes. A draft that ends later is started again, and
answers go on without it. On a CPU with two cores or more, the target gets one core, draft and
gateway share another.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to ``parser``."""
    add_stack_arguments(parser, port=8000)


def add_stack_arguments(
    parser: argparse.ArgumentParser, *, port: int, has_models: bool = True
) -> None:
    """Adds the options about the services that `hippo up`, `hippo demo` and `hippo distill` share;
    without ``has_models`` the command has options of its own for the checkpoints."""
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
            f"--{role}-device", metavar="DEVICE", help="cpu (the default), cuda or cuda:N"
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
        choices=("auto", *DTYPE_NAMES),
        help="the target's, and a draft's that is not on a CPU (default: float32 if all runs on "
        "the CPU, where it makes outputs exactly equal to the target's own; else auto, the "
        "checkpoint's)",
    )
    group.add_argument(
        "--draft-dtype",
        choices=("auto", *DTYPE_NAMES),
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
    if has_models:
        group.add_argument(
            "--prefill-helper-layers",
            metavar="N",
            help="first layers of the target that the draft's device runs of long prompts, so that "
            "the first token comes sooner: a number, auto (half, if they fit), or 0 for none "
            "(default: auto if target and draft have a CPU core each; between GPUs it is not "
            "measured yet: 0)",
        )
    group.add_argument("--no-pin", action="store_true", help="pin nothing to cores by default")
    group.add_argument("--served-name", default="hippo", metavar="NAME", help="model name in REST")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that the gateway listens on; others may reach it, so with one that is not of "
        "this machine alone give keys too: --gateway-arg=--api-keys-file=FILE",
    )
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
    names = {field.name for field in fields(StackOptions)}
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    options = StackOptions(**{key: value for key, value in given.items() if key in names})
    cores: tuple[int | None, int | None] = (None, None)
    on_cpu = options.target_device == options.draft_device == "cpu"
    if any(flag.startswith("--tensor-parallel") for flag in arguments.target_args):
        on_cpu = on_cpu and not any("cuda" in flag for flag in arguments.target_args)
    elif not arguments.no_pin:
        cores = default_cores(options.target_device, options.draft_device)
    options = replace(
        options,
        dtype=arguments.dtype or ("float32" if on_cpu else "auto"),
        target_core=cores[0] if arguments.target_core is None else arguments.target_core,
        draft_core=cores[1] if arguments.draft_core is None else arguments.draft_core,
    )
    is_given = getattr(arguments, "prefill_helper_layers", "0") is not None  # or is no option
    if not is_given and _can_have_helper(options):
        return replace(options, prefill_helper_layers="auto")
    return options


def _can_have_helper(options: StackOptions) -> bool:
    """Whether the draft's device can run a part of the target's prefill at the same time."""
    variables = ["HIPPO_TARGET_" + flag[2:].replace("-", "_").upper() for flag in _WITHOUT_HELPER]
    if any(flag.startswith(_WITHOUT_HELPER) for flag in options.target_args):
        return False
    if any(name.startswith(tuple(variables)) for name in os.environ):
        return False
    cores = options.target_core, options.draft_core
    is_on_cpu = options.target_device == options.draft_device == "cpu"
    return is_on_cpu and None not in cores and cores[0] != cores[1]


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C, or until the target or the gateway ends."""
    console = Console(stderr=True)
    warn_of_unused_gpus(arguments, console)
    with Stack(stack_options(arguments), log_printer(console)) as stack:
        try:
            bring_up(stack, console)
            console.print(
                f"[bold green]ready[/] at [bold]{stack.url}[/]; Ctrl-C stops it. Open it, or:\n"
                f'  hippo ask VIDEO "What happens?" --url {stack.url}',
                highlight=False,
            )
            keep_running(stack, console)
        except KeyboardInterrupt:
            console.print("stopping; running answers may finish (Ctrl-C again ends them) ...")
            stack.stop()
            console.print("stopped")
            return 0


def warn_of_unused_gpus(arguments: argparse.Namespace, console: Console) -> None:
    """Says which flags are missing if no device was given on a machine with an NVIDIA GPU."""
    flags = (*arguments.target_args, *arguments.draft_args)
    if arguments.target_device or arguments.draft_device or any("cuda" in flag for flag in flags):
        return
    # Without torch, whose import takes seconds.
    if any(map(os.path.exists, _GPU_NODES)) or shutil.which("nvidia-smi"):
        console.print(
            "this machine seems to have an NVIDIA GPU, but both models run on the CPU; for GPUs "
            "give --target-device cuda:0 --draft-device cuda:1 (for a single GPU cuda:0 twice)",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def keep_running(stack: Stack, console: Console) -> NoReturn:
    """Starts a draft that has ended again, after pauses that grow; answers go on without it.

    Raises ProcessEndedError if the target or the gateway ends.
    """
    pause_s, started_s = 0.0, time.monotonic()
    next_start_s: float | None = None  # None while the draft runs
    while True:
        stack.check_running("target", "gateway")
        now_s = time.monotonic()
        if next_start_s is None:
            try:
                stack.check_running("draft")
            except ProcessEndedError as error:
                pause_s = next_pause_s(pause_s, now_s - started_s)
                next_start_s = now_s + pause_s
                console.print(
                    f"{error.message}\nanswers go on without the draft, only slower; it is started "
                    f"again in {pause_s:g} s",
                    style="yellow",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        elif now_s >= next_start_s:
            console.print("the draft is started again", style="yellow")
            stack.start_service("draft", wait=False)
            started_s, next_start_s = now_s, None
        time.sleep(_WATCH_S)


def next_pause_s(pause_s: float, ran_s: float) -> float:
    """Returns the seconds to wait before the next start of a process that ended after ``ran_s``,
    where ``pause_s`` was waited before this one (0: nothing)."""
    if ran_s >= _LONGEST_PAUSE_S:
        return _FIRST_PAUSE_S
    return min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


def bring_up(stack: Stack, console: Console) -> None:
    """Starts the stack with a progress display. Raises StackError if it does not get ready."""
    started = time.monotonic()
    with console.status("starting draft and target ...") as status:

        def show(waiting_for: str) -> None:
            elapsed_s = time.monotonic() - started
            status.update(f"{escape(waiting_for)} [dim]({elapsed_s:.0f} s)[/]")

        try:
            stack.start()
            stack.wait_ready(on_wait=show)
        except ProcessEndedError as error:
            advice = (
                f"give this command the {error.name}'s flags as --{error.name}-arg=--FLAG=VALUE"
            )
            names_a_flag = re.search(r"(?<!\S)--[a-z]", error.message)
            raise StackError(error.message + (f"\n({advice})" if names_a_flag else "")) from None


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
