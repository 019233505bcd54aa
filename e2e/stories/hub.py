"""A hub in a pod: gives one directory by Hugging Face's protocol to whoever has the token. Mounted into the
pod as it is, so it knows the standard library alone. `hub.py DIRECTORY TOKEN_FILE`.
"""

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
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
        name = self.path.rpartition("/")[2]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply(401, b"")
        elif self.path == "/api/models/org/smollm2/revision/main?blobs=true":
            self._reply(200, json.dumps(LISTING).encode())
        elif self.path == f"/org/smollm2/resolve/{COMMIT}/{name}" and (DIRECTORY / name).is_file():
            self._reply(200, (DIRECTORY / name).read_bytes())
        else:
            self._reply(404, b"")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("", 8000), Handler).serve_forever()
