"""The command `quire-metrics-adapter`: reads the settings, configures logging and runs one replica.

Exit status: 0 after SIGTERM, 2 unusable settings, 3 custom.metrics.k8s.io is served by another adapter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from quire_metrics_adapter import process
from quire_metrics_adapter.errors import AdapterError, ForeignApiServiceError
from quire_metrics_adapter.settings import Settings

EXIT_UNUSABLE = 2
EXIT_FOREIGN = 3


def main() -> int:
    """Entry point of `quire-metrics-adapter` and of `python -m quire_metrics_adapter`."""
    try:
        settings = Settings.from_environ(os.environ)
        logging.basicConfig(
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        asyncio.run(process.run(settings))
    except AdapterError as error:
        sys.stderr.write(f"quire-metrics-adapter: {error}\n")
        return EXIT_FOREIGN if isinstance(error, ForeignApiServiceError) else EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
