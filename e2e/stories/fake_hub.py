"""A fake model hub: serves one directory by Hugging Face's protocol over HTTPS to clients that send the
token.

Usage: `fake_hub.py DIRECTORY TOKEN_FILE CERTIFICATE KEY`. It is mounted into a pod as a single file, so it
imports nothing but the standard library. The repository org/slow has the same files and sends them slowly.
"""

import hashlib
import json
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SECONDS_PER_MIB = 0.04
REPOSITORIES = {"org/smollm2": 0.0, "org/slow": SECONDS_PER_MIB}
COMMIT = "c0ffee" + "0" * 34
REVISIONS = ("main", COMMIT)
DIRECTORY, TOKEN = Path(sys.argv[1]), Path(sys.argv[2]).read_text().strip()


def described(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    return {"rfilename": path.name, "size": size, "lfs": {"sha256": sha256, "size": size}}


LISTING = {
    "sha": COMMIT,
    "siblings": [described(path) for path in sorted(DIRECTORY.iterdir()) if path.is_file()],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name, repository = self.path.rpartition("/")[2], self._repository()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply(401, b"")
        elif self.path in (f"/api/models/{repository}/revision/{name}?blobs=true" for name in REVISIONS):
            self._reply(200, json.dumps(LISTING).encode())
        elif self.path == f"/{repository}/resolve/{COMMIT}/{name}" and (DIRECTORY / name).is_file():
            self._give(DIRECTORY / name, REPOSITORIES[repository])
        else:
            self._reply(404, b"")

    def _repository(self) -> str:
        return next((name for name in REPOSITORIES if f"/{name}/" in self.path), "none")

    def _give(self, path: Path, seconds_per_mib: float) -> None:
        size = path.stat().st_size
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(1 << 20):
                time.sleep(seconds_per_mib)
                self.wfile.write(piece)

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(sys.argv[3], sys.argv[4])
server = ThreadingHTTPServer(("", 8000), Handler)
server.socket = tls.wrap_socket(server.socket, server_side=True)
server.serve_forever()
