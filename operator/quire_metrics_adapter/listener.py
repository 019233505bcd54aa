"""The TLS port, whose certificate and whose callers' authority change while it is open.

Each change makes a new listener on the same socket and ends the old one: nobody is refused, and open
connections go on. The private key reaches OpenSSL through memory that has no name. Used by the process.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from quire_metrics_adapter.certificates import Credentials

_BACKLOG = 128


class Listener:
    """One port on all addresses for the application of `runner`. Closed with the runner."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner = runner
        self._socket = _listening(port)
        self._site: web.SockSite | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    async def serve(self, credentials: Credentials, callers_authority: str) -> None:
        """From now on with these. `callers_authority`: PEM, empty when no client certificate is known."""
        site = web.SockSite(
            self._runner, self._socket.dup(), ssl_context=context(credentials, callers_authority)
        )
        await site.start()
        old, self._site = self._site, site
        if old is not None:
            await old.stop()

    def close(self) -> None:
        """Take no more connections once the runner's sites have ended."""
        self._socket.close()


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
    """A path to `content`, which is on no disk: OpenSSL takes nothing but files here."""
    descriptor = os.memfd_create("tls")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _listening(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)
