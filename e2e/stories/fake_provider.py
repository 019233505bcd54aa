"""A provider of completions over HTTPS that takes one key, and a classifier of prompts over HTTP.

Usage: `fake_provider.py KEY_FILE CERTIFICATE KEY`. It is mounted into a pod as a single file, so it
imports nothing but the standard library. The classifier says `simple` of prompts that begin with that word,
and `other` of all others.
"""

import json
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROVIDER_PORT, CLASSIFIER_PORT = 8000, 8001
KEY = Path(sys.argv[1]).read_text().strip()
TEXT = "from the provider"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        return found

    def answer(self, status: int, document: dict[str, object]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Provider(Handler):
    def do_POST(self) -> None:
        body = self.body()
        if self.headers["authorization"] != f"Bearer {KEY}":
            self.answer(401, {"error": {"message": "wrong key"}})
            return
        choice = {"index": 0, "text": TEXT, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        self.answer(200, {"id": "cmpl-1", "model": body["model"], "choices": [choice], "usage": usage})


class Classifier(Handler):
    def do_POST(self) -> None:
        is_simple = str(self.body()["promptStart"]).startswith("simple")
        self.answer(200, {"class": "simple" if is_simple else "other"})


def main() -> None:
    classifier = ThreadingHTTPServer(("", CLASSIFIER_PORT), Classifier)
    threading.Thread(target=classifier.serve_forever, daemon=True).start()
    provider = ThreadingHTTPServer(("", PROVIDER_PORT), Provider)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(sys.argv[2], sys.argv[3])
    provider.socket = tls.wrap_socket(provider.socket, server_side=True)
    provider.serve_forever()


main()
