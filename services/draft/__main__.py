"""The draft service: ``python -m services.draft --model FOLDER_OR_NAME``."""

import os
import sys
from collections.abc import Mapping, Sequence

from hippo.base.config import load_settings
from hippo.base.extras import needs_extra
from hippo.errors import HippoError
from services.draft.config import ENV_PREFIX, DraftSettings


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = load_settings(
            DraftSettings,
            argv,
            env,
            env_prefix=ENV_PREFIX,
            prog="python -m services.draft",
            description="Proposes tokens for a video language model: the small half of a pair.",
        )
        # Imported here, because --help and a wrong flag need not wait for torch.
        with needs_extra("engine", "the draft service"):
            from hippo.service.process import run_process
            from services.draft.servicer import build_service
    except HippoError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return run_process("draft", lambda: build_service(settings), settings, settings.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
