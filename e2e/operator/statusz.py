"""A model server's health port as the operator's poller sees it, with answers that a test sets."""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.http_server import HttpServer

HEALTH_PORT = 8001
# The keys of a config.json that memory depends on.
LLAMA_2_13B = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}


class StatuszServer:
    """`answer` may be changed while it serves; `asked` counts the requests."""

    def __init__(self, answer: dict[str, Any]) -> None:
        # Its own address, since the port is fixed: also while other tests and checkouts run.
        self.ip = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        self.answer = answer
        self.asked = 0


@contextmanager
def statusz_server(answer: dict[str, Any]) -> Iterator[StatuszServer]:
    """Serves /statusz (and every other path) while the block runs."""
    speaker = StatuszServer(answer)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            speaker.asked += 1
            body = json.dumps(speaker.answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                return  # the client had read enough

        def log_message(self, *_: Any) -> None:
            return

    server = HttpServer((speaker.ip, HEALTH_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield speaker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
