"""A follower's process: ``python -m hippo.parallel.follower``, started by hippo.parallel.followers.

Its stdin closes when rank 0 ends for any reason. This process then exits immediately, even in a
blocked collective.
"""

import contextlib
import logging
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hippo.base.subprocesses import end_with_parent
from hippo.models.interface.plan import LoadPlan
from hippo.parallel.commands import Stop


class _Reports(logging.Handler):
    """Sends reports to rank 0: "ready", "failed" with a message, and log records."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def send_report(self, *report: object) -> None:
        with self.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
            self._connection.send(report)

    def emit(self, record: logging.LogRecord) -> None:
        self.send_report("log", record.levelno, self.format(record))


def main(argv: Sequence[str]) -> int:
    """Loads this rank's part and runs commands; returns the exit code."""
    rank, rendezvous = int(argv[0]), argv[1]
    commands, reports = Connection(int(argv[2])), _Reports(Connection(int(argv[3])))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles them, and sends Stop

    def remove_folder() -> None:  # if rank 0 was killed
        if rendezvous:
            shutil.rmtree(Path(rendezvous).parent, ignore_errors=True)

    end_with_parent(remove_folder)
    root = logging.getLogger()
    root.handlers[:] = [reports]

    from hippo.errors import HippoError

    try:
        plan: LoadPlan = commands.recv()
        root.setLevel(plan.log_level.upper())
        if plan.first_layers is None:
            _run(plan, rank, rendezvous, commands, reports)
        else:
            _help(plan, int(argv[4]), commands, reports)
    except HippoError as error:
        reports.send_report("failed", error.message)
        return 1
    except EOFError:  # rank 0 has ended
        remove_folder()
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("failed")
        reports.send_report("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _run(
    plan: LoadPlan, rank: int, rendezvous: str, commands: Connection, reports: _Reports
) -> None:
    # Imported here, so that end_with_parent is active during the import of torch.
    import torch

    from hippo.engine.cpu import prepare_cpu
    from hippo.models.load import load_model
    from hippo.models.products.group import RankGroup
    from hippo.models.products.shards import Shards
    from hippo.parallel.model import follow

    prepare_cpu(plan.core_of(rank), plan.num_threads)
    devices = tuple(map(torch.device, plan.rank_devices))
    group = RankGroup(rendezvous, rank, devices)
    model = load_model(plan, progress=_log_progress, shards=Shards(group))
    reports.send_report("ready")
    follow(model, group, commands.recv)
    group.close()


def _help(plan: LoadPlan, file: int, commands: Connection, reports: _Reports) -> None:
    """Runs a prefill helper, which shares the memory file ``file``."""
    from hippo.engine.cpu import prepare_cpu
    from hippo.models.load import load_parts
    from hippo.models.loading.memory import free_memory
    from hippo.models.loading.resolve import import_transformers
    from hippo.parallel.help_memory import HelpMemory, layer_shape
    from hippo.parallel.helper import PrefillHelper

    prepare_cpu(plan.cpu_core, plan.num_threads)
    import_transformers().logging.set_verbosity_error()  # the model's process warns
    setup = commands.recv()  # while the model's process has loaded its layers
    if isinstance(setup, Stop):
        return
    loaded, _ = load_parts(setup.plan)
    memory = HelpMemory(layer_shape(loaded), setup.num_rows, file, loaded.cache.device)
    helper = PrefillHelper(loaded, memory, commands, partial(reports.send_report, "news"))
    del loaded  # tower, embeddings and head, which the helper does not need
    free_memory(helper.device)
    helper.warm_up()
    reports.send_report("ready")
    helper.serve()


def _log_progress(stage: str, share: float) -> None:
    logging.getLogger(__name__).info("%s: %d %%", stage, int(share * 100))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
