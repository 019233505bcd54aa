"""uvicorn on a socket that is bound already, with our protocol and without its own idea of signals.

It listens before it serves, so that a port that is taken is an error at the start; and it ends when it is
stopped, after a drain that the application decides on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator

import uvicorn

from quire_http.asgi import Application
from quire_http.connection_limit import ConnectionLimit, raise_file_limit
from quire_http.parser_turns import ParserTurns
from quire_http.protocol import Connection

# Longer than clients keep idle connections, so that the client is the one who closes.
_KEEP_ALIVE_SECONDS = 75
# Connections that one round of the event loop accepts. It accepts one of each listening socket, so that a
# client's would wait for a round for each one that came before: the one socket has several descriptors.
_ACCEPTS_PER_ROUND = 8
# A peer that has vanished (a lost node, a pulled cable) says nothing: its connection is closed when it has
# acknowledged nothing for so long. gRPC waits as long by default.
_LOST_PEER_SECONDS = 20
_PROBE_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to exactly the address that was asked for. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _notice_lost_peers(listener)
    listener.bind(address)
    return listener


def _notice_lost_peers(listener: socket.socket) -> None:
    """Set what accepted connections inherit: probes of idle ones, a limit for what stays unacknowledged."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_PEER_SECONDS // 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_PEER_SECONDS // 2 // _PROBE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_PEER_SECONDS)


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to the drain: it would hang up on clients where we drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """One server on one socket. ``on_refusal`` is called for each connection that there is no room for."""

    def __init__(
        self,
        application: Application,
        listener: socket.socket,
        *,
        max_connection_age: float,
        on_refusal: Callable[[], None],
    ) -> None:
        connection = functools.partial(
            Connection,
            max_age=max_connection_age,
            limit=ConnectionLimit(raise_file_limit(), on_refusal),
            turns=ParserTurns(),
        )
        self._listener = listener
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                application,
                http=connection,  # type: ignore[arg-type]  # uvicorn only calls it
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,  # nothing asks for a client's address, and anyone can write them
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )

    async def start(self) -> asyncio.Task[None]:
        """Listen; returns the task that serves, which ends early only where it fails."""
        listeners = [self._listener, *(self._listener.dup() for _ in range(_ACCEPTS_PER_ROUND - 1))]
        serving = asyncio.get_running_loop().create_task(self._uvicorn.serve(sockets=listeners))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        return serving

    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [one for one in self._uvicorn.server_state.connections if isinstance(one, Connection)]

    def stop(self) -> None:
        """Close what is left; the task of `start` ends soon."""
        self._uvicorn.should_exit = True
