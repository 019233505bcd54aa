"""A certificate from a mounted Secret, issued by cert-manager for example.

Used instead of the publisher where it is configured; then no APIService is written. The files are read
periodically, because the kubelet replaces them on renewal.
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
    """`credentials` as last read. Raises SettingsError where there are none at start."""

    published = True  # the issuer has put its authority into the APIService

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self.credentials = self._read()
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"no usable tls.crt and tls.key in {directory}: {error}") from error

    async def run(self, renewed: Callable[[], None]) -> None:
        """Until cancelled; `renewed` is called when `credentials` change."""
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
        listener.context(found, "")  # the files may not match while they are being replaced
        return found
