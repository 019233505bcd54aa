"""The life of one request in the house: who asks, what it took, and that its end is told and counted once.

Called by `completions`, which knows what is asked and how it is answered; this module does not.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from quire_server import log, metrics
from quire_server.api import span_attributes
from quire_server.api.degradation import OUT_OF_MEMORY, Degradation
from quire_server.api.delivery import Tally
from quire_server.api.errors import ENGINE_UNAVAILABLE, ApiError, from_exception, overloaded
from quire_server.api.house import House
from quire_server.api.reply import ClientGoneError, CutError, Reply

logger = logging.getLogger(__name__)

Handler = Callable[["Visit"], Awaitable[None]]


class Visit:
    """One request in the house."""

    def __init__(self, house: House, reply: Reply) -> None:
        self.house = house
        self.reply = reply
        self.arrived_at = time.monotonic()
        self.response_id = uuid.uuid4().hex  # a client may use its request id twice
        self.prompt_tokens = 0
        self.degradation = Degradation(reply, house.metrics)
        self.earlier_tokens = 0  # of a try that was given up
        self.tally = Tally()
        self.is_timed = False
        self.transcript = house.request_log.open(house.tokenizer.decode)
        path = reply.scope["path"]
        self.span = house.tracing.begin(
            f"POST {path}", reply.scope["headers"], span_attributes.arrived(path, reply.request_id)
        )
        self.charged_tokens: int | None = None  # to the client's rate, before anything was known for certain

    @property
    def completion_tokens(self) -> int:
        """Tokens that were generated for it, sent or not."""
        return self.earlier_tokens + self.tally.completion_tokens

    def lose(self, num_tokens: int) -> None:
        """Tokens that came for an answer that was cut before they were said."""
        self.tally.completion_tokens += num_tokens

    @property
    def client(self) -> str:
        """The name of the API key, empty where there are none."""
        name: str = self.reply.scope.get("quire.client", "")
        return name

    def settle(self, code: int | None) -> None:
        """Charge the client's rate for what it took in the end: nothing, where it was refused unserved."""
        if self.charged_tokens is None:
            return
        if code == 503 and not self.prompt_tokens:
            self.house.rates.refund(self.client)
        tokens = self.prompt_tokens + self.completion_tokens - self.charged_tokens
        self.house.rates.spend(self.client, tokens)


async def account(visit: Visit, handle: Handler) -> None:
    """Run a visit; whatever happens, the client hears of it if it is still there, and it is counted once."""
    house, reply, status = visit.house, visit.reply, "error"
    code: int | None = None
    error_type = ""
    log.request_facts.set({"request_id": reply.request_id, **visit.span.ids})
    house.drain.num_requests += 1
    try:
        await handle(visit)
        status, code = "success", 200
    except ClientGoneError:
        status = "aborted"
    except CutError:
        status, error_type = "cancelled", "draining"
        house.metrics.cancelled()
        await reply.error(overloaded("draining", "The server is going away and its time is over.", 1))
    except Exception as error:  # the boundary of a request: every error becomes its answer
        answer = from_exception(error)
        status, code = _status_name(answer), answer.status
        error_type = answer.code or str(code) if code >= 500 else ""
        if answer.code == OUT_OF_MEMORY:
            visit.degradation.note(OUT_OF_MEMORY)
        if answer.code in metrics.REFUSALS:
            house.metrics.refused(answer.code)
        if answer.status == 500:
            logger.exception("request failed")
        await reply.error(answer)
    finally:
        house.drain.num_requests -= 1
        visit.settle(code)
        seconds = time.monotonic() - visit.arrived_at
        house.metrics.request_ended(status, seconds, visit.span.exemplar)
        told = span_attributes.ended(visit.response_id, status, code, visit.prompt_tokens, visit.tally)
        visit.span.end(told, error_type)
        if house.drain.begun and status == "success":
            house.metrics.drained()
        house.request_log.write(
            {
                "response_id": visit.response_id,
                "client": visit.client,
                "path": reply.scope["path"],
                "status": status,
                "prompt_tokens": visit.prompt_tokens,
                "completion_tokens": visit.completion_tokens,
                "seconds": round(seconds, 4),
            },
            visit.transcript,
        )


def _status_name(answer: ApiError) -> str:
    if answer.status == 503:  # an outage is no policy
        return "error" if answer.code in (ENGINE_UNAVAILABLE, OUT_OF_MEMORY) else "shed"
    if answer.status == 429:
        return "limited"
    return "client_error" if answer.status < 500 else "error"
