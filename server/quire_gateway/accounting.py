"""What is known of one request when it is over: for the metrics, its span and the access log, exactly once.

Neither prompts nor answers, and no header of a client but its request id.
"""

from __future__ import annotations

from collections.abc import Callable

from quire_gateway import usage
from quire_gateway.client_limits import Reservation
from quire_gateway.llm_route import Prices
from quire_gateway.log import AccessLog
from quire_gateway.metrics import Metrics
from quire_gateway.openai import calls
from quire_gateway.response_cache import Recording
from quire_gateway.rollout import Arm
from quire_gateway.tracing import Attributes, RequestSpan
from quire_gateway.usage import Usage
from quire_http.errors import ApiError
from quire_http.exchange import ClientGoneError, CutError


class Account:
    """One request."""

    def __init__(
        self,
        path: str,
        request_id: str,
        metrics: Metrics,
        log: AccessLog,
        clock: Callable[[], float],
        span: RequestSpan | None = None,
    ) -> None:
        self.span = span  # None: no traces are exported
        self.client = ""  # whose key it has, empty where keys are not required
        self.model = ""  # as it was asked for, empty until it is known that there is one
        self.deployment = ""  # that it was sent to
        self.stream = False
        self.generates = True  # else its prompt is counted, and takes nothing
        self.status = 0  # of HTTP, 0 where nothing was sent
        self.broken = ""  # why the answer ended early
        self.error_type = ""  # the same as a label of metrics
        self.usage: Usage | None = None  # what the answer says that it took
        self.prompt_tokens = 0  # by estimate
        self.num_events = 0  # of a stream, about one for each token
        self.recording: Recording | None = None  # of the answer, where it may be kept
        self.reservation: Reservation | None = None  # of the client's limits, where it has any
        self.arm: Arm | None = None  # of a rollout
        self.route = ""  # the LLMRoute by which it goes
        self.fallback = ""  # the last one that was tried
        self.held_seconds = 0.0  # for a model that is started
        self.replicas: list[str] = []  # the pods that were asked, in their order
        self._path = path
        self._is_input_output = path in calls.INPUT_OUTPUT_PATHS
        self._find_usage = usage.find_last if self._is_input_output else usage.find
        self._find_in_events = usage.find_in_comment if self._is_input_output else usage.find
        self._request_id = request_id
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._begun_at = clock()
        self._first_byte: float | None = None
        metrics.begun()

    @property
    def has_begun(self) -> bool:
        """Whether an answer has."""
        return self._first_byte is not None

    def answer_begins(self, status: int) -> None:
        """The first bytes of an answer are here."""
        self.status = status
        self._first_byte = self._clock() - self._begun_at

    def breaks(self, reason: str, message: str) -> None:
        """What answered has failed, and nothing else answers."""
        self.error_type, self.broken = reason, message

    def read_usage(self, data: bytes) -> None:
        """Read the usage where these bytes of an answer have it."""
        self.usage = self._find_usage(data) or self.usage

    def read_part(self, data: bytes) -> None:
        """The same of a part of an answer, none where only its end has what is no client's."""
        if not self._is_input_output:
            self.read_usage(data)

    def read_events(self, events: bytes) -> None:
        """The same of whole events of a stream, which are counted. Without a usage it is not whole."""
        self.usage = self._find_in_events(events) or self.usage
        self.num_events += events.count(b"\n\n")

    def reprice(self, prices: Prices) -> bool:
        """Something of these prices is to answer: whether the client's budget has room for it."""
        try:
            if self.reservation is not None:
                self.reservation.reprice(prices)
        except ApiError:
            return False
        return True

    def end(self, error: Exception | None) -> None:
        """The request is over; ``error``: why, where it was not answered by a replica."""
        if isinstance(error, ApiError):
            self.status = self.status or error.status
        seconds = self._clock() - self._begun_at
        outcome = self._outcome(error)
        self._settle(error)
        if self.arm is not None and outcome not in ("aborted", "client_error", "limited", "cancelled"):
            is_error = bool(self.fallback) or outcome != "success"
            self._metrics.rollouts.ended(self.arm, is_error=is_error, first_byte=self._first_byte)
        self._metrics.ended(self.model, self.client, outcome, seconds, self._first_byte)
        if self.span is not None:
            self.span.end(self._attributes(outcome), self._error_type(error))
        self._log.request(
            {
                "request_id": self._request_id,
                **({} if self.span is None else self.span.ids),
                "path": self._path,
                "client": self.client,
                "model": self.model,
                "deployment": self.deployment,
                "stream": self.stream,
                "status": self.status,
                "outcome": outcome,
                "broken": self.broken,
                "replicas": self.replicas,
                **self._tokens(),
                "seconds": round(seconds, 6),
                "first_byte_seconds": None if self._first_byte is None else round(self._first_byte, 6),
            }
        )

    def _settle(self, error: Exception | None) -> None:
        """Count the tokens, and give back what was reserved and not taken."""
        if self.usage is not None and self.generates:
            self._metrics.took(self.model, self.client, self.usage)
        if self.reservation is None:
            return
        is_whole = not self.stream or (error is None and not self.broken)
        if self.usage is not None and is_whole and not self.generates:
            self.reservation.settle(0, 0)
        elif self.usage is not None and is_whole:
            self.reservation.settle(self.usage.prompt, self.usage.completion)
        elif not self.replicas:
            self.reservation.release()  # it went no further than this gateway
        elif self.status >= 500 or (self.status == 0 and not isinstance(error, ClientGoneError)):
            self.reservation.release()
        elif self.status >= 300:
            self.reservation.settle(0, 0)
        elif self.stream:
            # It ended before it said all: where each chunk has a usage, that is of one of several answers.
            found = self.usage or Usage(0, 0)
            prompt = max(found.prompt, self.prompt_tokens)
            self.reservation.settle(prompt, max(found.completion, self.num_events))
        else:
            self.reservation.settle_whole()  # the client did not wait for what was computed

    def _tokens(self) -> dict[str, int | None]:
        found = self.usage
        return {
            "prompt_tokens": found.prompt if found else None,
            "completion_tokens": found.completion if found else None,
            "cached_tokens": found.cached if found else None,
        }

    def _attributes(self, outcome: str) -> Attributes:
        """What the span says of the end, and of all that led to it."""
        tokens = self._tokens()
        return {
            "http.response.status_code": self.status or None,
            "quire.status": outcome,
            "quire.client": self.client or None,
            "quire.route": self.route or None,
            "quire.fallback": self.fallback or None,
            "quire.hold.seconds": self.held_seconds or None,
            "gen_ai.latency.time_to_first_token": self._first_byte,
            "gen_ai.usage.input_tokens": tokens["prompt_tokens"],
            "gen_ai.usage.output_tokens": tokens["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": tokens["cached_tokens"],
        }

    def _error_type(self, error: Exception | None) -> str:
        """Empty where the request was answered, or what was wrong is the client's."""
        if isinstance(error, ClientGoneError):
            return ""
        if isinstance(error, CutError):
            return "draining"
        if error is not None and not isinstance(error, ApiError):
            return type(error).__name__
        if self.broken:
            return self.error_type
        if self.status >= 500:
            return (isinstance(error, ApiError) and error.code) or str(self.status)
        return ""

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
