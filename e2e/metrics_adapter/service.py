"""The part of kube-proxy for a Service: connections to one port are distributed over the listening
backends.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator


class Balancer:
    """`backends`: ports of the loopback interface; may be changed at any time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.backends: list[int] = []
        self.taken: list[int] = []  # by which backend each connection was taken
        self._turn = itertools.count()

    def connect(self) -> socket.socket | None:
        """A connection to a backend that listens, None where none does."""
        backends, turn = list(self.backends), next(self._turn)
        for offset in range(len(backends)):
            port = backends[(turn + offset) % len(backends)]
            try:
                found = socket.create_connection(("127.0.0.1", port), timeout=5)
            except OSError:
                continue
            found.settimeout(None)
            self.taken.append(port)
            return found
        return None


@contextlib.contextmanager
def balancing() -> Iterator[Balancer]:
    """Forwards while the block runs."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            backend = balancer.connect()
            if backend is not None:
                with backend:
                    back = threading.Thread(target=_copy, args=(backend, self.request), daemon=True)
                    back.start()
                    _copy(self.request, backend)
                    back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    balancer = Balancer(int(server.server_address[1]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield balancer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until either side closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
