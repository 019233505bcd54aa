"""What was done to a request so that it gets an answer at all: said in a header, and counted.

Made by `completions` for each request; `generation` notes what it cuts. A header can only be sent before the
response has begun, so a stream may be degraded without one; the metric counts it all the same.
"""

from __future__ import annotations

from quire_server.api.reply import Reply
from quire_server.metrics import Metrics

HEADER = "x-quire-degraded"
DEADLINE = "deadline"  # the answer ends early, with what it had
HALVED = "halved_max_tokens"  # a second try, for half of the tokens
OUT_OF_MEMORY = "out_of_memory"  # given up for the sake of the others in its step


class Degradation:
    """Of one request; each kind counts once, however many answers it has."""

    def __init__(self, reply: Reply, metrics: Metrics) -> None:
        self._reply = reply
        self._metrics = metrics
        self._reasons: list[str] = []

    def note(self, reason: str) -> None:
        """It happened."""
        if reason in self._reasons:
            return
        self._reasons.append(reason)
        self._metrics.degraded(reason)
        others = [(name, value) for name, value in self._reply.headers if name != HEADER]
        self._reply.headers = [*others, (HEADER, ", ".join(self._reasons))]
