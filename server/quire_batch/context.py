"""What the routes of the API share: the store, whose a request is, and what ids look like."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request

from quire_batch.contents import Contents
from quire_batch.identity import Caller, GatewayTokens
from quire_batch.metrics import Metrics
from quire_batch.records import Batch, new_id
from quire_batch.settings import Settings
from quire_batch.space import Space
from quire_batch.store import Store
from quire_http.errors import ApiError

ID = r"^[A-Za-z0-9_-]{1,64}$"
#: Asks clients not to try again by themselves.
NO_RETRY = (("x-should-retry", "false"),)


@dataclass(frozen=True, kw_only=True)
class Context:
    """``wake`` is called, in any thread, for new work; ``is_ready``: whether this process serves."""

    store: Store
    contents: Contents
    space: Space
    tokens: GatewayTokens
    metrics: Metrics
    settings: Settings
    wake: Callable[[], object]
    is_ready: Callable[[], bool]
    clock: Callable[[], float] = time.time
    uploads: Counter[str] = field(default_factory=Counter)  # that come now, by client; of the event loop

    def new(self, kind: str, caller: Caller, **values: Any) -> Batch:
        """A batch or a job that is submitted now."""
        now = int(self.clock())
        return Batch(
            id=new_id(kind),
            owner=caller.client,
            delegation=caller.delegation,
            created_at=now,
            expires_at=now + int(self.settings.window_seconds),
            **values,
        )


def of(request: Request) -> Context:
    """The context of the application that serves a request."""
    context: Context = request.app.state.context
    return context


async def _caller(request: Request) -> Caller:
    return of(request).tokens.caller(request.scope["headers"])


async def _server(request: Request) -> Context:
    return of(request)


Server = Annotated[Context, Depends(_server)]
Who = Annotated[Caller, Depends(_caller)]
Id = Annotated[str, Path(alias="id", pattern=ID)]
After = Annotated[str, Query(pattern=ID)]


def not_found(kind: str, id_: str) -> ApiError:
    """It is not there, or not the caller's: the two look alike."""
    return ApiError(404, f"There is no {kind} {id_}.", code="not_found")
