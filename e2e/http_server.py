"""The HTTP server of a test, in threads of this process.

A client that hangs up is no error here: clients under test do. Python's own server prints such errors, from a
thread that may outlive what pytest has put in the place of stderr.
"""

from __future__ import annotations

import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

_POLL_SECONDS = 0.02  # for `stop`


class HttpServer(ThreadingHTTPServer):
    """As its base, but for clients that hang up."""

    daemon_threads = True
    request_queue_size = 128  # many clients may come at once

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def start(self) -> None:
        """Serve in a thread, until `stop`."""
        threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()

    def stop(self) -> None:
        """Serve no more, and close the listener."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what a handler has raised, if it was not the client."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
