"""Where the end of a job may be reported, and what is sent there: Standard Webhooks. Pure.

A webhook names a target that this program connects to, so only origins that the administrator has listed
are targets, compared whole: scheme, host and port. The message says which job has ended, and how; its answer
is asked for with a key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

MAX_FAILURES = 6
_FIRST_DELAY_SECONDS = 5.0
_DELAY_FACTOR = 4  # 5 s, 20 s, 80 s, 5 min, 21 min
_MAX_URL = 2048
_PORTS = {"http": 80, "https": 443}


class WebhookError(Exception):
    """Why a URL is no webhook."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Of a URL."""

    scheme: str
    host: str
    port: int


def origin(url: str) -> Origin:
    """Raises WebhookError."""
    if len(url) > _MAX_URL or any(not "!" <= character <= "~" for character in url) or "\\" in url:
        raise WebhookError("it must have at most 2048 characters of ASCII, without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise WebhookError("it is no URL") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise WebhookError("it must be an http or https URL with a host")
    if "@" in parts.netloc or parts.fragment:
        raise WebhookError("it must have no user and no fragment")
    return Origin(parts.scheme, parts.hostname.rstrip("."), port or _PORTS[parts.scheme])


def headers(secret: bytes, message_id: str, now: float, body: bytes) -> Mapping[str, str]:
    """What proves to the receiver that a message is ours, and of now."""
    seconds = str(int(now))
    text = b".".join((message_id.encode(), seconds.encode(), body))
    signature = base64.b64encode(hmac.digest(secret, text, hashlib.sha256)).decode()
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": seconds,
        "webhook-signature": f"v1,{signature}",
    }


def body(job_id: str, status: str, now: float) -> bytes:
    """The message."""
    data = {"id": job_id, "object": "job", "status": status}
    return orjson.dumps({"type": f"job.{status}", "timestamp": int(now), "data": data})


def delay(failures: int) -> float | None:
    """Seconds until a message is tried again that has failed so often; None: it is given up."""
    if failures >= MAX_FAILURES:
        return None
    return float(_FIRST_DELAY_SECONDS * _DELAY_FACTOR ** (failures - 1))
