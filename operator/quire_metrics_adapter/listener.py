"""The TLS port, whose certificate and client authority can be replaced while it is open.

Each new connection gets the newest certificate; open connections continue. There are MAX_CONNECTIONS at most.
Beyond that, the oldest connection without a client certificate, or with an unfinished handshake, is closed,
so that strangers cannot lock out the API server. The private key is passed to OpenSSL through an anonymous
memory file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from quire_metrics_adapter.certificates import Credentials

logger = logging.getLogger(__name__)

# An API server keeps a few connections; there are rarely more than five API servers.
MAX_CONNECTIONS = 256
HANDSHAKE_SECONDS = 5.0
_BACKLOG = 128
_PAUSE_SECONDS = 0.1


class Listener:
    """One port on all addresses for the application of `runner`, which has to be set up."""

    def __init__(self, runner: web.AppRunner, port: int, most: int = MAX_CONNECTIONS) -> None:
        self._runner = runner
        self._most = most
        self._socket = _listening(port)
        self._context: ssl.SSLContext | None = None
        self._known = asyncio.Event()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._open: list[asyncio.BaseTransport] = []  # the oldest first

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    def serve(self, credentials: Credentials, callers_authority: str) -> None:
        """Use these credentials for new connections. `callers_authority`: PEM, empty where no client
        certificate is known.
        """
        self._context = context(credentials, callers_authority)
        self._known.set()

    async def run(self) -> None:
        """Accept connections until cancelled."""
        await self._known.wait()
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no file descriptor is left, or the client has disconnected
                logger.warning("cannot take a connection: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if not self._has_room():
                connection.close()
                continue
            task = loop.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # the task closes its connection itself when it is cancelled

    def close(self) -> None:
        """Accept no more connections; the runner closes those that are open."""
        for task in self._handshakes:
            task.cancel()
        self._socket.close()

    def _has_room(self) -> bool:
        """Whether one more connection is possible, by closing one if necessary."""
        self._open = [transport for transport in self._open if not transport.is_closing()]
        if len(self._open) + len(self._handshakes) < self._most:
            return True
        strangers = (one for one in self._open if not one.get_extra_info("peercert"))
        if oldest := next(strangers, None):
            self._open.remove(oldest)
            oldest.close()
            return True
        if silent := next(iter(self._handshakes), None):
            self._forget(silent)
            silent.cancel()
            return True
        return False

    def _forget(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)

    async def _shake_hands(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None  # the runner is set up
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # including TLS errors and timeouts
            logger.debug("no handshake: %s", error)
        else:
            self._open.append(transport)


def context(credentials: Credentials, callers_authority: str) -> ssl.SSLContext:
    """TLS 1.2 or newer; a client certificate is checked against `callers_authority` where one is given."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    with _in_memory(credentials.chain) as chain, _in_memory(credentials.key) as key:
        made.load_cert_chain(chain, key)
    if callers_authority:
        made.verify_mode = ssl.CERT_OPTIONAL
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority may be the root here
        made.load_verify_locations(cadata=callers_authority)
    return made


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path to `content` in memory, because OpenSSL only accepts files here."""
    descriptor = os.memfd_create("tls")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _listening(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    made = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)
    made.setblocking(False)
    return made
