"""What is known of one request when it is over: for the metrics and the access log, exactly once.

Neither prompts nor answers, and no header of a client but its request id.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire_gateway.log import AccessLog
from quire_gateway.metrics import Metrics
from quire_http.errors import ApiError
from quire_http.exchange import ClientGoneError, CutError

_CACHED = b'"cached_tokens":'
_CACHED_TOKENS = re.compile(_CACHED + rb"\s*(\d{1,9})\b")


class Account:
    """One request."""

    def __init__(
        self, path: str, request_id: str, metrics: Metrics, log: AccessLog, clock: Callable[[], float]
    ) -> None:
        self.client = ""  # whose key it has, empty where keys are not required
        self.model = ""  # as it was asked for, empty until it is known that there is one
        self.deployment = ""  # that it was sent to
        self.stream = False
        self.status = 0  # of HTTP, 0 where nothing was sent
        self.broken = ""  # why the answer ended early
        self.cached_tokens: int | None = None  # of the prompt, where the answer says it
        self.replicas: list[str] = []  # the pods that were asked, in their order
        self._path = path
        self._request_id = request_id
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._begun_at = clock()
        self._first_byte: float | None = None
        metrics.begun()

    def answer_begins(self, status: int) -> None:
        """The first bytes of an answer are here."""
        self.status = status
        self._first_byte = self._clock() - self._begun_at

    def read_usage(self, data: bytes) -> None:
        """Read the usage where these bytes of an answer have it. In JSON no text of a model or a client has
        these quotes unescaped, so that nothing need be parsed.
        """
        if _CACHED in data and (found := _CACHED_TOKENS.search(data)):
            self.cached_tokens = int(found[1])

    def end(self, error: Exception | None) -> None:
        """The request is over; ``error``: why, where it was not answered by a replica."""
        if isinstance(error, ApiError):
            self.status = self.status or error.status
        seconds = self._clock() - self._begun_at
        outcome = self._outcome(error)
        self._metrics.ended(self.model, self.client, outcome, seconds, self._first_byte)
        self._log.request(
            {
                "request_id": self._request_id,
                "path": self._path,
                "client": self.client,
                "model": self.model,
                "deployment": self.deployment,
                "stream": self.stream,
                "status": self.status,
                "outcome": outcome,
                "broken": self.broken,
                "replicas": self.replicas,
                "cached_tokens": self.cached_tokens,
                "seconds": round(seconds, 6),
                "first_byte_seconds": None if self._first_byte is None else round(self._first_byte, 6),
            }
        )

    def _outcome(self, error: Exception | None) -> str:
        """In the engine's words for how a request ends."""
        if isinstance(error, ClientGoneError):
            return "aborted"
        if isinstance(error, CutError):
            return "cancelled"
        if self.broken or (error is not None and not isinstance(error, ApiError)):
            return "error"
        by_status = {429: "limited", 503: "shed"}
        if self.status >= 400:
            return by_status.get(self.status, "client_error" if self.status < 500 else "error")
        return "success"
