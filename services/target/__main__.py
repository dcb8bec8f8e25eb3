"""The target service: ``python -m services.target --model FOLDER_OR_NAME``."""

import os
import sys
from collections.abc import Mapping, Sequence

from hippo.base.config import load_settings
from hippo.base.extras import needs_extra
from hippo.errors import HippoError
from services.target.config import ENV_PREFIX, TargetSettings


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = load_settings(
            TargetSettings,
            argv,
            env,
            env_prefix=ENV_PREFIX,
            prog="python -m services.target",
            description="Settles tokens with a video language model: the large half of a pair.",
        )
        # Imported here, because --help and a wrong flag need not wait for torch.
        with needs_extra("engine", "the target service"):
            from hippo.service.process import ModelSource, run_process
            from services.target.servicer import build_service
    except HippoError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2

    source: ModelSource | None = None
    if settings.tensor_parallel > 1:
        from hippo.parallel.source import ParallelSource

        source = ParallelSource(settings.load_plan)
    elif settings.has_helper:
        from hippo.parallel.help_source import HelpedSource

        source = HelpedSource(
            settings.load_plan,
            settings.helper_plan,
            num_layers=settings.prefill_helper_layers,
            score_layers=settings.score_layers,
        )
    return run_process("target", lambda: build_service(settings), settings, settings.port, source)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
