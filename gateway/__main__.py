"""The gateway: ``python -m gateway --target HOST:PORT --draft HOST:PORT``."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence

import uvloop

from gateway.common.config import ENV_PREFIX, GatewaySettings
from gateway.server import pin_to_core, serve
from hippo.base.config import SettingsError, load_settings
from hippo.base.logs import setup_logging
from hippo.base.tracing import start_tracing, stop_tracing
from hippo.errors import HippoError

logger = logging.getLogger("gateway")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs the gateway until it is stopped, and returns the exit code."""
    try:
        settings = load_settings(
            GatewaySettings,
            argv,
            env,
            env_prefix=ENV_PREFIX,
            prog="python -m gateway",
            description="Serves a draft/target pair over an OpenAI-style REST interface.",
        )
        setup_logging("gateway", level=settings.log_level, style=settings.log_style)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every URL
        if settings.cpu_core is not None:
            # Before gRPC starts its threads, which inherit the pinning.
            pin_to_core(settings.cpu_core)
        start_tracing("gateway")
        uvloop.run(serve(settings))
    except SettingsError as error:  # also for a file or variable named in the settings
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    except HippoError as error:
        logger.error("%s", error.message)
        return 1
    finally:
        stop_tracing()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
