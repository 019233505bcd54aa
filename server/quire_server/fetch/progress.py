"""Progress of a download: counted by its threads, shown as JSON lines, in a file, and at /statusz.

The document has the fields of a loading server's /statusz, so that the operator parses both alike.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_WINDOW_SECONDS = 20.0


class Progress:
    """Counters; every method is safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = "resolving"
        self._total = 0
        self._done: dict[str, int] = {}
        self._fetched = 0
        self._history: deque[tuple[float, int]] = deque([(clock(), 0)])

    def begin(self, phase: str, total: int | None = None) -> None:
        """Enter a phase."""
        with self._lock:
            self._phase = phase
            self._total = self._total if total is None else total

    def at(self, name: str, position: int, fetched: int = 0) -> None:
        """A file is on the disk up to ``position``; ``fetched`` bytes of that were just downloaded."""
        with self._lock:
            self._done[name] = position
            self._fetched += fetched

    def document(self) -> dict[str, Any]:
        """phase, loadedBytes, totalBytes, bytesPerSecond, and etaSeconds if the speed is known."""
        with self._lock:
            now, fetched = self._clock(), self._fetched
            while len(self._history) > 1 and now - self._history[0][0] > _WINDOW_SECONDS:
                self._history.popleft()
            then, before = self._history[0]
            if now - self._history[-1][0] >= 0.5:
                self._history.append((now, fetched))
            speed = (fetched - before) / (now - then) if now > then else 0.0
            loaded = min(sum(self._done.values()), self._total)
            document: dict[str, Any] = {
                "phase": self._phase,
                "loadedBytes": loaded,
                "totalBytes": self._total,
                "bytesPerSecond": int(speed),
            }
            if speed > 0:
                document["etaSeconds"] = round((self._total - loaded) / speed, 1)
            return document


class Reporter:
    """Writes the progress as lines to ``write`` and the newest one to ``path``, until the context ends."""

    def __init__(
        self, progress: Progress, write: Callable[[str], object], path: Path | None, period: float = 1.0
    ) -> None:
        self._progress = progress
        self._write = write
        self._path = path
        self._period = period
        self._end = threading.Event()
        self._last: dict[str, Any] = {}
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._show()

    def _run(self) -> None:
        while not self._end.wait(self._period):
            self._show()

    def _show(self) -> None:
        document = self._progress.document()
        if document == self._last:
            return
        self._last = document
        line = json.dumps(document)
        self._write(f"{line}\n")
        if self._path is not None and not self._has_failed:
            new = self._path.with_name(f".{self._path.name}.new")
            try:
                new.write_text(f"{line}\n", encoding="utf-8")
                os.replace(new, self._path)
            except OSError as error:  # the download goes on without it
                self._has_failed = True
                sys.stderr.write(f"quire-server: {self._path} cannot be written: {error.strerror}\n")


def serve(progress: Progress, port: int) -> ThreadingHTTPServer:
    """Answer GET /statusz on a port until the server is shut down."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:  # the name is http.server's
            """Send the document."""
            found = self.path.partition("?")[0] == "/statusz"
            payload = json.dumps(progress.document() if found else {"error": "not found"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def version_string(self) -> str:
            """Does not reveal the interpreter's version."""
            return "quire"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is http.server's
            """Requests are not logged."""

    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="statusz", daemon=True).start()
    return server
