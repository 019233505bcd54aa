"""The least that a relay costs in Python: bench/bare_relay.py PORT UPSTREAM

uvicorn and aiohttp as the gateway has them, and nothing between: one upstream, no choice, no retries, no
limits, no metrics. It is the bound that ``bench.gateway`` measures the gateway against.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import uvicorn

_HEADERS = frozenset((b"content-type", b"content-length"))


class BareRelay:
    """The ASGI application."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Pass one request on, and its answer back."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=timeout)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._upstream + scope["path"], data=body, headers=headers) as answer:
            kept = [one for one in answer.raw_headers if one[0].lower() in _HEADERS]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            while data := await answer.content.readany():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        BareRelay(sys.argv[2]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="error",
        proxy_headers=False,
    )
