"""A hub on loopback with Hugging Face's API: a listing, and redirects to another host that has the files."""

import hashlib
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from e2e.http_server import HttpServer

COMMIT = "c0ffee" + "0" * 34
SIGNATURE = "signed-url-canary"


class _Listener:
    """One HTTP server on its own port."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HttpServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.port = self.server.server_address[1]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class HubServer:
    """``faults``: by file name, a function that may answer in place of the store; it returns whether it
    did.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.token: str | None = None
        self.listing_status: list[tuple[int, dict[str, str]]] = []  # answered first, in this order
        self.extra_siblings: list[dict[str, object]] = []
        self.promised: dict[str, str] = {}  # wrong sha256 to announce
        self.announced: dict[str, int] = {}  # wrong sizes to announce
        self.faults: dict[str, Callable[[BaseHTTPRequestHandler, bytes], bool]] = {}
        self.ignores_ranges = False
        self.piece = 1 << 16
        self.before_piece: Callable[[], object] = lambda: None
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # (host, path, headers)
        self._store = _Listener(self._give)
        self._hub = _Listener(self._answer)
        self.endpoint = f"http://127.0.0.1:{self._hub.port}"

    def wrap(self, context: ssl.SSLContext) -> None:
        """Use TLS for the hub from now on; the store stays on plain HTTP."""
        self._hub.server.socket = context.wrap_socket(self._hub.server.socket, server_side=True)
        self.endpoint = self.endpoint.replace("http:", "https:")

    def close(self) -> None:
        self._hub.close()
        self._store.close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(("hub", handler.path, dict(handler.headers)))
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            reply(handler, 401, b"", {"X-Error-Code": "GatedRepo"})
        elif handler.path == "/api/models/org/tiny/revision/main?blobs=true" or COMMIT in handler.path[:80]:
            if "/resolve/" in handler.path:
                name = handler.path.partition(f"/resolve/{COMMIT}/")[2]
                where = f"http://localhost:{self._store.port}/{name}?X-Signature={SIGNATURE}"
                reply(handler, 302, b"", {"Location": where})
            elif self.listing_status:
                status, headers = self.listing_status.pop(0)
                reply(handler, status, b"no", headers)
            else:
                reply(handler, 200, json.dumps(self._listing()).encode())
        else:
            reply(handler, 404, b"", {"X-Error-Code": "RepoNotFound"})

    def _listing(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, data in self.files.items():
            size = self.announced.get(name, len(data))
            entry: dict[str, object] = {"rfilename": name, "size": size}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith((".safetensors", ".bin")):
                sha256 = self.promised.get(name, hashlib.sha256(data).hexdigest())
                entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
            siblings.append(entry)
        return {"id": "org/tiny", "sha": COMMIT, "siblings": siblings + self.extra_siblings}

    def _give(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(("store", handler.path, dict(handler.headers)))
        name = unquote(handler.path.partition("?")[0].lstrip("/"))
        data = self.files[name]
        fault = self.faults.get(name)
        if fault is not None and fault(handler, data):
            return
        requested = handler.headers.get("Range")
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
        if requested and not self.ignores_ranges:
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            data = data[start:]
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        try:
            for begin in range(0, len(data), self.piece):
                self.before_piece()
                handler.wfile.write(data[begin : begin + self.piece])
                self.sent[name] += len(data[begin : begin + self.piece])
        except OSError:  # the fetcher was killed
            handler.close_connection = True


def reply(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    """Send one short response."""
    handler.send_response(status)
    for key, value in (headers or {}).items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def cut(handler: BaseHTTPRequestHandler, data: bytes) -> bool:
    """Send half of the announced bytes and close the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True
    return True


def once(
    fault: Callable[[BaseHTTPRequestHandler, bytes], bool],
) -> Callable[[BaseHTTPRequestHandler, bytes], bool]:
    """Apply the fault to the first request only."""
    left = [fault]
    return lambda handler, data: left.pop()(handler, data) if left else False
