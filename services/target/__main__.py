"""The target service: ``python -m services.target --model FOLDER_OR_NAME``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hippo.config import SettingsError, load_settings
from services.target.config import ENV_PREFIX, TargetSettings

if TYPE_CHECKING:
    from hippo.engine.process import ModelSource


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    try:
        settings = load_settings(
            TargetSettings,
            argv,
            env,
            env_prefix=ENV_PREFIX,
            prog="python -m services.target",
            description="Settles tokens with a video language model: the large half of a pair.",
        )
    except SettingsError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    # Not before: --help and a wrong flag need not wait for torch.
    from hippo.engine.process import run_process
    from services.target.servicer import build_service

    source = None
    if settings.tensor_parallel > 1:
        source = _parallel_source(settings)
        if cores := settings.rank_cores:  # this process is rank 0
            settings = replace(
                settings, tensor_parallel=1, devices=(), cpu_cores=(), cpu_core=cores[0]
            )
    return run_process("target", lambda: build_service(settings), settings, settings.port, source)


def _parallel_source(settings: TargetSettings) -> ModelSource:
    from hippo.parallel.source import ParallelOptions, ParallelSource

    return ParallelSource(
        ParallelOptions(
            model=settings.model,
            devices=settings.rank_devices,
            cpu_cores=settings.rank_cores,
            num_threads=settings.num_threads,
            dtype=settings.dtype,
            num_slots=settings.num_slots,
            max_context_length=settings.max_context_length,
            reserved_bytes=settings.reserved_bytes,
            budget_bytes=settings.memory_bytes,
            served_name=settings.served_name,
            log_level=settings.log_level,
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
