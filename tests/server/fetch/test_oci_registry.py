"""``quire-server fetch oci://...`` against a registry that implements the distribution specification."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.http_server import HttpServer
from tests.server.fetch import published
from tests.server.fetch.hub_server import reply

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PASSWORD = "registry-canary-password"


class RegistryServer:
    """``tokens`` False: a registry without authentication."""

    def __init__(self, files: dict[str, bytes], tokens: bool) -> None:
        self.tokens = tokens
        self.blobs = {digest(data): data for data in files.values()}
        self.layers = [
            {
                "mediaType": "application/octet-stream",
                "digest": digest(data),
                "size": len(data),
                "annotations": {"org.opencontainers.image.title": name},
            }
            for name, data in files.items()
        ]
        self.index: bytes | None = None
        self.redirects_to = ""
        self.seen: list[str | None] = []  # Authorization header of each request
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # clients may close connections
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def manifest(self) -> bytes:
        return json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": self.layers}).encode()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, authorization = handler.path, handler.headers.get("Authorization")
        self.seen.append(authorization)
        if self.redirects_to and not path.startswith("/token"):
            reply(handler, 307, b"", {"Location": f"http://{self.redirects_to}{path}"})
            return
        if path.startswith("/token"):
            expected = base64.b64encode(f"robot:{PASSWORD}".encode()).decode()
            assert "scope=repository%3Amodels%2Ftiny%3Apull" in path
            if authorization == f"Basic {expected}":
                reply(handler, 200, b'{"token": "short-lived"}')
            else:
                reply(handler, 401, b"")
        elif self.tokens and authorization != "Bearer short-lived":
            challenge = f'Bearer realm="http://{self.address}/token",service="registry"'
            reply(handler, 401, b"", {"WWW-Authenticate": challenge})
        elif path == "/v2/models/tiny/manifests/v1" and self.index is not None:
            reply(handler, 200, self.index)
        elif path in ("/v2/models/tiny/manifests/v1", f"/v2/models/tiny/manifests/{digest(self.manifest)}"):
            reply(handler, 200, self.manifest)
        elif path.startswith("/v2/models/tiny/blobs/"):
            reply(handler, 200, self.blobs[path.rpartition("/")[2]])
        else:
            reply(handler, 404, b"")


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture(params=[True, False], ids=["tokens", "open"])
def registry(request):
    server = RegistryServer(published.files(), request.param)
    yield server
    server.close()


@pytest.fixture
def docker(tmp_path, registry):
    """A DOCKER_CONFIG as ``docker login`` writes it."""
    directory = tmp_path / "docker"
    directory.mkdir()
    auth = base64.b64encode(f"robot:{PASSWORD}".encode()).decode()
    (directory / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": auth}}}))
    return directory


def test_an_artifact_arrives_by_tag_and_by_digest(registry, docker, fetch, tmp_path):
    for name, reference in (("tag", ":v1"), ("digest", f"@{digest(registry.manifest)}")):
        source = f"oci://{registry.address}/models/tiny{reference}"
        outcome = fetch(source, to=tmp_path / name, DOCKER_CONFIG=docker)
        assert (outcome.code, outcome.error) == (0, "")
        assert json.loads(outcome.log)["revision"] == digest(registry.manifest)
        assert {wanted: (tmp_path / name / wanted).read_bytes() for wanted in published.WANTED} == {
            wanted: registry.blobs[layer["digest"]]
            for layer in registry.layers
            if (wanted := layer["annotations"]["org.opencontainers.image.title"]) in published.WANTED
        }


def test_an_index_of_one_artifact_is_followed_and_of_several_refused(registry, docker, fetch, tmp_path):
    entry = {"digest": digest(registry.manifest)}
    registry.index = json.dumps({"manifests": [entry]}).encode()
    source = f"oci://{registry.address}/models/tiny:v1"
    assert fetch(source, to=tmp_path / "one", DOCKER_CONFIG=docker).code == 0
    registry.index = json.dumps({"manifests": [entry, entry]}).encode()
    outcome = fetch(source, to=tmp_path / "two", attempts=1, DOCKER_CONFIG=docker)
    assert outcome.code == 69
    assert "by its digest" in outcome.error


@pytest.mark.parametrize("registry", [True], indirect=True)
def test_without_credentials_access_is_denied(registry, fetch):
    outcome = fetch(f"oci://{registry.address}/models/tiny:v1")
    assert outcome.code == 77
    assert "DOCKER_CONFIG" in outcome.error


@pytest.mark.parametrize("registry", [False], indirect=True)
@pytest.mark.parametrize(
    "auths", [{}, {"registry.example": {"auth": "YTpi"}}, {"": {}}], ids=["none", "another's", "empty"]
)
def test_a_pull_secret_without_the_registry_s_credentials_does_not_make_a_download_anonymous(
    registry, docker, fetch, auths
):
    entries = {name or registry.address: entry for name, entry in auths.items()}
    (docker / "config.json").write_text(json.dumps({"auths": entries}))
    outcome = fetch(f"oci://{registry.address}/models/tiny:v1", attempts=1, DOCKER_CONFIG=docker)
    assert outcome.code == 2
    assert f"no credentials for {registry.address}" in outcome.error
    assert registry.seen == []


@pytest.mark.parametrize("registry", [True], indirect=True)
def test_a_wrong_password_is_denied_and_never_logged(registry, docker, fetch):
    auth = base64.b64encode(b"robot:wrong-canary").decode()
    (docker / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": auth}}}))
    outcome = fetch(f"oci://{registry.address}/models/tiny:v1", DOCKER_CONFIG=docker)
    assert outcome.code == 77
    assert "canary" not in repr(outcome)
    assert auth not in repr(outcome)


@pytest.mark.parametrize("registry", [False], indirect=True)
def test_a_missing_tag_is_not_found(registry, fetch):
    outcome = fetch(f"oci://{registry.address}/models/tiny:v2")
    assert outcome.code == 66
    assert "tag or digest" in outcome.error


@pytest.mark.parametrize("registry", [False], indirect=True)
def test_other_bytes_than_the_digest_are_refused(registry, fetch, tmp_path):
    layer = registry.layers[0]
    registry.blobs[layer["digest"]] = registry.blobs[layer["digest"]][::-1]
    outcome = fetch(f"oci://{registry.address}/models/tiny:v1", to=tmp_path / "model")
    assert outcome.code == 65
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("registry", [False], indirect=True)
def test_the_password_is_not_sent_to_redirect_targets(registry, docker, fetch):
    other = RegistryServer(published.files(), tokens=True)
    registry.redirects_to = other.address.replace("127.0.0.1", "localhost")
    outcome = fetch(f"oci://{registry.address}/models/tiny:v1", attempts=1, DOCKER_CONFIG=docker)
    other.close()
    assert outcome.code == 69
    assert "a redirect to one who asks for credentials" in outcome.error
    assert other.seen and set(other.seen) == {None}
