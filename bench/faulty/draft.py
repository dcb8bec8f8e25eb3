"""The draft service with a fault in its model: ``python -m bench.faulty.draft --draft-fault ...``.

It also takes the options of ``python -m services.draft``; ``python -m bench.faulty`` starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from bench.faulty.model import FaultyModel
from hippo.base.config import load_settings
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Progress
from hippo.service.process import LocalSource, run_process
from services.draft.config import ENV_PREFIX, DraftSettings
from services.draft.servicer import build_service
from tests.support.running.faults import DraftFault, parse_fault

_FLAG = "--draft-fault"


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    place = list(argv).index(_FLAG)
    fault = parse_fault(argv[place + 1])
    settings = load_settings(
        DraftSettings,
        [*argv[:place], *argv[place + 2 :]],
        env,
        env_prefix=ENV_PREFIX,
        prog="python -m bench.faulty.draft",
        description=__doc__ or "",
    )
    source = _FaultySource(settings, fault)
    return run_process("draft", lambda: build_service(settings), settings, settings.port, source)


class _FaultySource(LocalSource):
    """Loads the model as the service does, and adds the fault."""

    def __init__(self, settings: DraftSettings, fault: DraftFault) -> None:
        super().__init__(settings)
        self._fault = fault

    def load(self, progress: Progress) -> VideoLanguageModel:
        return FaultyModel(super().load(progress), self._fault)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
