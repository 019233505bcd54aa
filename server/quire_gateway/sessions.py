"""aiohttp's connections to replicas and external backends, kept for the next request.

One that was used before may be closed by the other side in the moment in which it is used again; the request
is then sent once more, over a new one, and that is no failure. Knows no replica and no API.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.connector import AddrInfoType, Connection
from yarl import URL

# A host that does not answer is given up after so many further packets, by the kernel, within 3 s. A timer of
# the event loop would count the time in which the loop itself is busy, and take a burst of clients for a lost
# host.
_CONNECT_RETRANSMISSIONS = 1
_POOL_SECONDS = 15.0  # the replicas keep idle connections for longer
_NO_OWN_HEADERS = frozenset(("accept", "accept-encoding", "content-type", "user-agent"))


def make_socket(address: AddrInfoType) -> socket.socket:
    """That of a connection to an address."""
    family, kind, protocol, _, _ = address
    return socket.socket(family, kind, protocol)


class Sessions:
    """Connections that are kept for the next request, and those that are not."""

    def __init__(self, make_socket: Callable[[AddrInfoType], socket.socket] = make_socket) -> None:
        def limited(address: AddrInfoType) -> socket.socket:
            if (origin := _origin.get()) is not None:
                origin.is_new = True
            made = make_socket(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _CONNECT_RETRANSMISSIONS)
            return made

        self._pooled = _session(_Connector(limit=0, socket_factory=limited, keepalive_timeout=_POOL_SECONDS))
        self._single = _session(_Connector(limit=0, socket_factory=limited, force_close=True))

    async def request(
        self,
        method: str,
        url: URL,
        body: bytes | bytearray,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | bool = True,
    ) -> aiohttp.ClientResponse:
        """The head of the answer. Raises aiohttp.ClientError."""
        options: dict[str, Any] = {"data": body, "headers": headers, "ssl": tls, "allow_redirects": False}
        try:
            return await self._pooled.request(method, url, **options)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            origin = _origin.get()
            is_new = origin is None or origin.is_new
            if is_new or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._single.request(method, url, **options)

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._single.close()


@dataclass(slots=True)
class _Origin:
    """Of a connection: made for the request that has it, or used before. Tasks that connect share it."""

    is_new: bool = False


_origin: ContextVar[_Origin | None] = ContextVar("_origin", default=None)  # of the task's last request


class _Connector(aiohttp.TCPConnector):
    """Notes for which request a connection is made, and which gets one that was used before. aiohttp's
    tracing says so, too, at a tenth of all that a request costs.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """A connection for a request of the present task."""
        _origin.set(_Origin())
        return await super().connect(req, traces, timeout)


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_OWN_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),
    )
