"""The digest of a tag, as a registry has it that asks for an anonymous token first, like Docker's."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.http_server import HttpServer
from e2e.images import registry
from e2e.images.errors import ImageError

INDEX = json.dumps({"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}).encode()


class Registry(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        host = self.headers["Host"]
        if self.path == "/token?service=registry&scope=repository%3Ateam%2Fdebian%3Apull":
            self.answer(200, json.dumps({"token": "anonymous"}).encode())
        elif self.path != "/v2/team/debian/manifests/12-slim":
            self.answer(404, b"{}")
        elif self.headers.get("Authorization") != "Bearer anonymous":
            challenge = f'Bearer realm="http://{host}/token",service="registry",scope="x"'
            self.answer(401, b"{}", {"WWW-Authenticate": challenge})
        elif "image.index" in self.headers["Accept"]:
            self.answer(200, INDEX, {"Docker-Content-Digest": "sha256:a-lie"})
        else:
            self.answer(200, b"the manifest of one platform")

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def host() -> Iterator[str]:
    with HttpServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_digest_is_that_of_the_index_of_all_platforms(host: str) -> None:
    expected = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"
    assert registry.digest(f"{host}/team/debian:12-slim") == expected


def test_a_tag_that_is_not_there_and_a_registry_that_is_not_are_one_clear_error(host: str) -> None:
    with pytest.raises(ImageError, match="does not say what .*/team/debian:13 is: HTTP Error 404"):
        registry.digest(f"{host}/team/debian:13")
    with pytest.raises(ImageError, match="localhost:1 does not say what"):
        registry.digest("localhost:1/debian:12-slim")


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("debian:12-slim", ("registry-1.docker.io", "library/debian", "12-slim")),
        ("team/debian", ("registry-1.docker.io", "team/debian", "latest")),
        ("registry.example.com/debian:12", ("registry.example.com", "debian", "12")),
        ("localhost:5000/a/b:1", ("localhost:5000", "a/b", "1")),
    ],
)
def test_a_short_name_is_completed_as_docker_does(image: str, parts: tuple[str, str, str]) -> None:
    assert registry.split(image) == parts
