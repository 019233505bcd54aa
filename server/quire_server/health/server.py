"""The HTTP server of the probes: one thread per connection, four paths.

Decides nothing: it reads the shared memory and returns the verdict of `decision`. Where too many connections
have not sent their request, the one that has waited longest is closed for each new one, so that no
client keeps the kubelet out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from quire_server.core.topology import Topology
from quire_server.health import decision, model_config
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import SharedState
from quire_server.health.rank_states import Group, rank_states

logger = logging.getLogger(__name__)

#: Connections that have not sent their request. Each has a thread; a probe has sent its own at once.
MAX_WAITING = 64
PATHS = frozenset({"/startupz", "/readyz", "/livez", "/statusz"})


class HealthServer(ThreadingHTTPServer):
    """Serves the kubelet's probes and the operator's status requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], state: SharedState, thresholds: Thresholds, version: str
    ) -> None:
        self.state = state
        self.thresholds = thresholds
        self.version = version
        self.model: Mapping[str, object] = {}
        self.effective: Callable[[], Mapping[str, object] | None] = lambda: None
        self.canary: Callable[[], Mapping[str, object] | None] = lambda: None
        self.adapters: Callable[[], object] = list
        self.topology = Topology()
        self.hosts: Callable[[], Mapping[int, str]] = dict
        self._waiting: dict[object, None] = {}  # sockets, in the order in which they came
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def read_model_config(self, model: Path) -> None:
        """Read the model's config.json on a thread of its own, because probes must not wait for slow
        storage.
        """

        def read() -> None:
            self.model = model_config.read(model)

        threading.Thread(target=read, name="model config", daemon=True).start()

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse DNS look-up, which can take seconds in a pod."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "quire", self.server_address[1]

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Take a new connection."""
        with self._lock:
            longest = next(iter(self._waiting)) if len(self._waiting) >= MAX_WAITING else None
            self._waiting.pop(longest, None)
            self._waiting[request] = None
        if isinstance(longest, socket.socket):
            with contextlib.suppress(OSError):
                longest.shutdown(socket.SHUT_RDWR)  # its thread sees the end of what it reads, and ends
        super().process_request(request, client_address)

    def stop_waiting(self, request: object) -> None:
        """A connection has sent its request, or is closed."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close a connection."""
        self.stop_waiting(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log errors of the server itself, which would look like a dead engine; ignore peers that hang up."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a probe failed")

    def answer(self, path: str) -> tuple[int, dict[str, object]] | None:
        """Status and body of one path, None for a path that does not exist."""
        if path not in PATHS:
            return None
        now = time.monotonic()
        sample = self.state.read_heartbeat()
        control, beats = self.state.read_control(), self.state.read_beats()
        verdict = decision.judge(sample, control, beats, now, self.thresholds)
        if path == "/statusz":
            body = decision.statusz(sample, verdict, now, self.version)
            loaded = {"effective": self.effective(), "canary": self.canary(), "adapters": self.adapters()}
            states = rank_states(
                beats,
                self.state.read_steps(),
                now,
                self.thresholds.ranks,
                lost_rank=0 if sample is None else sample.lost_rank,
                killed=control.killed,
                group=Group(self.topology, self.hosts(), self.state.read_echoes(), self.state.read_sent_at()),
            )
            ranks = {"ranks": [state.document() for state in states]}
            return 200, {**body, "config": dict(self.model), **loaded, **ranks}
        probes = {"/startupz": verdict.startup, "/readyz": verdict.ready, "/livez": verdict.live}
        probe = probes[path]
        return probe.status, {"ok": probe.status == 200, "reason": probe.reason, "phase": verdict.phase}


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = 5  # seconds until the thread of a silent peer is freed

    def parse_request(self) -> bool:
        """Read the rest of a request whose first line has come."""
        is_valid = super().parse_request()
        self.server.stop_waiting(self.request)
        return is_valid

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer one request."""
        status, body = self.server.answer(self.path.partition("?")[0]) or (404, {"error": "not found"})
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def version_string(self) -> str:
        """Do not disclose the interpreter's version."""
        return "quire"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is http.server's
        """Do not log requests: probes come every few seconds."""
