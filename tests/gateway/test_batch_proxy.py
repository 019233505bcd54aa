"""What the gateway passes on to quire-batch of a request's body: all of a file, and of others as much as the
longest job has. quire-batch is a stub here, which takes any length.
"""

from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from e2e.http_server import HttpServer
from quire_batch.lines import MAX_LINE_BYTES
from tests.batch.launch import http_client, wait, write_keys
from tests.gateway.kube_stub import KubeStub
from tests.gateway.launch import Gateway


class StubBatch:
    """A context manager. ``received``: of each request that came whole, the bytes of its body; ``begun``: how
    many there were; ``answer``: of each.
    """

    def __init__(self):
        self.received, self.begun = [], 0
        self.announced, self.connections = [], 0  # lengths by requests without a body
        self.answer = (200, {})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                outer.connections += 1

            def do_GET(self):
                outer.announced.append(self.headers["content-length"])
                self._answer()

            do_DELETE = do_GET

            def do_POST(self):
                outer.begun += 1
                outer.received.append(sum(map(len, self._parts())))
                self._answer()

            def _answer(self):
                status, headers = outer.answer
                self.send_response(status)
                for name, value in {**headers, "content-length": "2"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"{}")

            def _parts(self):
                length = self.headers["content-length"]
                while length is None:
                    size = int(self.rfile.readline(), 16)
                    yield self.rfile.read(size)
                    self.rfile.readline()
                    if not size:
                        return
                yield self.rfile.read(int(length))

            def log_message(self, *args):
                pass

        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self.url = self._server.url
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._server.stop()


@pytest.fixture
def stub():
    with StubBatch() as stub:
        yield stub


@pytest.fixture
def gateway(stub, tmp_path):
    keys = write_keys(tmp_path / "keys")
    settings = {
        "SIGNING_KEY_FILE": keys / "tls.key",
        "PUBLIC_KEYS_DIR": keys / "public",
        "BATCH_URL": stub.url,
    }
    with KubeStub() as kube, Gateway(kube.url, tmp_path, **settings) as gateway:
        wait("the gateway is ready", lambda: _is_ready(gateway))
        yield gateway


def _is_ready(gateway):
    try:
        return gateway.probe("readyz") == 200
    except httpx.TransportError:
        return False


def pieces(size):
    """A body whose length is not announced."""
    while size:
        part = min(size, 1 << 20)
        yield b"x" * part
        size -= part


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/batches"])
def test_a_body_that_is_longer_than_any_job_is_refused_whether_announced_or_not(gateway, stub, path):
    client = http_client(base_url=gateway.url)
    for body in (b"x" * (MAX_LINE_BYTES + 1), pieces(MAX_LINE_BYTES + 1)):
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    assert not stub.received, "nothing of that came whole"
    assert stub.begun <= 1, "and what was announced has not begun"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_body_that_is_not_passed_on_is_not_announced_to_what_serves_other_clients(gateway, stub, method):
    client = http_client(base_url=gateway.url)
    for _ in range(2):
        assert client.request(method, "/v1/files/file-1", content=b"x" * 50).status_code == 200
    assert set(stub.announced) <= {None, "0"} and stub.connections == 1


def test_the_longest_job_passes_and_files_of_any_length(gateway, stub):
    client = http_client(base_url=gateway.url)
    for path, size in (("/v1/jobs", MAX_LINE_BYTES), ("/v1/files", 3 * MAX_LINE_BYTES)):
        for body in (b"x" * size, pieces(size)):
            assert client.post(path, content=body).status_code == 200
            assert stub.received.pop() == size


def test_what_says_that_a_second_try_is_of_no_use_passes(gateway, stub):
    stub.answer = 409, {"x-should-retry": "false", "x-internal": "1"}
    answer = http_client(base_url=gateway.url).post("/v1/batches/batch_1/cancel")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert "x-internal" not in answer.headers
