"""A target whose device fails for good as soon as a file is there.

``python -m tests.support.running.failing_service FILE FLAGS...``, with the flags of the target
service.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from hippo.base.config import load_settings
from hippo.models.interface.base import StepPlan
from hippo.models.interface.checkpoint import Progress
from hippo.service.process import LocalSource, run_process
from services.target.config import TargetSettings
from services.target.servicer import build_service


class FailingSource(LocalSource):
    """Of a model whose forwards raise what a CUDA error that stays does."""

    failure_file: Path

    def load(self, progress: Progress) -> Any:
        model: Any = super().load(progress)
        forward = model.forward

        def failing(plan: StepPlan) -> Any:
            if self.failure_file.exists():
                raise RuntimeError("CUDA error: an illegal memory access\nmore about it")
            time.sleep(0.01)  # an answer lasts until the file is there
            return forward(plan)

        model.forward = failing
        return model


def main(failure_file: str, flags: list[str]) -> int:
    """Serves until SIGTERM or its failure; the exit code."""
    settings = load_settings(
        TargetSettings, flags, os.environ, env_prefix="HIPPO_TEST_", prog="target", description=""
    )
    source = FailingSource(settings)
    source.failure_file = Path(failure_file)
    return run_process("target", lambda: build_service(settings), settings, settings.port, source)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
