"""The HTTP server of a test, in threads of this process.

A client that hangs up is no error here: clients under test do. Python's own server prints such errors, from a
thread that may outlive what pytest has put in the place of stderr.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class HttpServer(ThreadingHTTPServer):
    """As its base, but for clients that hang up."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what a handler has raised, if it was not the client."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
