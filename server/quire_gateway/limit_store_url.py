"""Where the limit store is, and the errors of it: what each gateway needs.

Without the client of Redis, which is half of a gateway's imports and needed only where there is a store.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_SCHEMES = ("redis", "rediss")
CA = "ca.crt"  #: beside the URL


class LimitStoreError(Exception):
    """The store did not answer. ``reason``: of few, for a metric."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class LimitStoreEmptyError(LimitStoreError):
    """The store answers, and has lost its data: nothing of this exchange was done. Ask again."""


def read_url(file: Path) -> str:
    """The URL. Raises LimitStoreError, which does not say what the file has."""
    try:
        url = file.read_text(encoding="utf-8").strip()
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.port == 0:
            raise ValueError
        if any(name.lower().startswith("ssl") for name in parse_qs(parts.query, keep_blank_values=True)):
            message = (
                f"{file} has an option ssl_...: certificates are verified always, by {CA} beside it if any"
            )
            raise LimitStoreError("config", message)
    except OSError as error:
        raise LimitStoreError("config", f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        message = f"{file} has to be redis://:PASSWORD@HOST:PORT, or rediss:// for TLS"
        raise LimitStoreError("config", message) from None
    return url
