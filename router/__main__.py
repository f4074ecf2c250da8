"""`python -m router`."""

import asyncio
import sys

from common import config, lifecycle, logs, quiet_libraries  # noqa: F401
from common.config import ConfigError
from common.model_files import ModelFilesError
from common.rpc import AddressError
from common.tracing import TracingError
from router.config import RouterConfig
from router.server import run


def main() -> int:
    """Runs the router; returns the exit status."""
    settings = config.load(RouterConfig, "router")
    logs.setup("router", settings.log_level, settings.log_format)
    if settings.exit_with_parent:
        lifecycle.exit_with_parent()
    try:
        asyncio.run(run(settings))
    except (AddressError, ConfigError, ModelFilesError, TracingError) as error:
        sys.stderr.write(f"python -m router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
