"""The draft service with a fault in its model: ``python -m bench.faulty.draft --draft-fault ...``.

Takes what ``python -m services.draft`` takes besides; ``python -m bench.faulty`` starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from bench.faulty.faults import DraftFault, parse_fault
from bench.faulty.model import FaultyModel
from hippo.config import load_settings
from hippo.engine.process import run_process
from hippo.errors import HippoError
from hippo.models.base import VideoLanguageModel
from hippo.models.checkpoint import Progress
from hippo.models.loading import load_model
from services.draft.config import ENV_PREFIX, DraftSettings
from services.draft.servicer import build_service

_FLAG = "--draft-fault"


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
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


class _FaultySource:
    """Loads the model as the service would."""

    def __init__(self, settings: DraftSettings, fault: DraftFault) -> None:
        self._settings = settings
        self._fault = fault
        self.lost: Future[HippoError] = Future()  # never

    def load(self, progress: Progress) -> VideoLanguageModel:
        settings = self._settings
        model = load_model(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            num_slots=settings.slots,
            max_context_length=settings.max_context_length,
            served_name=settings.served_name,
            progress=progress,
        )
        return FaultyModel(model, self._fault)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
