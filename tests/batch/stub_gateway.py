"""A gateway that answers what a test wants, and remembers which lines it was asked for, and how often."""

import contextlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler

from e2e.http_server import HttpServer


class StubGateway:
    """A context manager. ``answer``: from a request's content, a status, a body and headers; None: a
    completion. While `hold` is clear requests wait; it is cleared by the request of the number ``hold_at``.
    """

    def __init__(self, answer=None):
        self.answer = answer or (lambda content: None)
        self.asked = Counter()  # by content
        self.order = []
        self.headers = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.hold_at = 0
        self.hold = threading.Event()
        self.hold.set()
        self._lock = threading.Lock()
        self._server = HttpServer(("127.0.0.1", 0), _handler(self))
        self.url = self._server.url
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.hold.set()
        self._server.stop()

    def counts(self):
        """How many requests are in flight, and how many there were, at one time."""
        with self._lock:
            return self.in_flight, self.asked.total()

    @contextlib.contextmanager
    def asking(self, content, headers):
        with self._lock:
            self.asked[content] += 1
            self.order.append(content)
            self.headers.append(headers)
            self.in_flight += 1
            if self.hold_at and self.asked.total() >= self.hold_at:
                self.hold_at = 0
                self.hold.clear()
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.hold.wait(60)
            yield
        finally:
            with self._lock:
                self.in_flight -= 1


def _handler(stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            with stub.asking(content, dict(self.headers)):
                given = stub.answer(content) or (200, {"object": "chat.completion", "echo": content}, {})
            status, answer, headers = given
            text = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "content-type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    return Handler
