"""A certificate of somebody else's making (cert-manager's, say), from a mounted Secret.

Instead of the publisher, where the administrator says so: then nobody here writes to an APIService. Started
by the process; looks for a renewed pair now and then, for the kubelet replaces the files.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from quire_metrics_adapter import listener
from quire_metrics_adapter.certificates import Credentials
from quire_metrics_adapter.errors import SettingsError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0


class MountedPair:
    """`credentials` as they were read last. SettingsError when there are none to begin with."""

    published = True  # whoever made the pair told the API server of its authority

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self.credentials = self._read()
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"no usable tls.crt and tls.key in {directory}: {error}") from error

    async def run(self, renewed: Callable[[], None]) -> None:
        """Until cancelled; `renewed` is called when `credentials` are new."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                found = self._read()
            except (OSError, ssl.SSLError) as error:
                logger.warning("the mounted certificate cannot be used, the last one still is: %s", error)
                continue
            if found != self.credentials:
                self.credentials = found
                renewed()

    def _read(self) -> Credentials:
        found = Credentials(
            chain=(self._directory / "tls.crt").read_bytes(), key=(self._directory / "tls.key").read_bytes()
        )
        listener.context(found, "")  # while the files are being replaced they may not fit each other
        return found
