"""The environment of a fetch: proxies, CA bundles, the status port."""

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from e2e.http_server import HttpServer
from e2e.ports import free_port
from tests.server.fetch import published
from tests.server.fetch.hub_server import reply

SOURCE = "hf://org/tiny"


class Proxy:
    """Forwards plain HTTP; ``seen`` lists the requested hosts."""

    def __init__(self) -> None:
        proxy = self
        self.seen: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.seen.append(httpx.URL(self.path).host)
                headers = {
                    key: value for key, value in self.headers.items() if key.lower() != "proxy-connection"
                }
                with httpx.Client(trust_env=False) as client:
                    answer = client.get(self.path, headers=headers)
                kept = {
                    key: answer.headers[key] for key in ("location", "content-range") if key in answer.headers
                }
                reply(self, answer.status_code, answer.content, kept)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HttpServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def proxy():
    proxy = Proxy()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


def test_a_proxy_is_used_except_for_hosts_in_no_proxy(hub, proxy, fetch, tmp_path):
    environment = {"HF_ENDPOINT": hub.endpoint, "HTTP_PROXY": f"http://user:canary@{proxy.address}"}
    outcome = fetch(SOURCE, to=tmp_path / "all", NO_PROXY="example.com", **environment)
    assert outcome.code == 0
    assert set(proxy.seen) == {"127.0.0.1", "localhost"}
    proxy.seen.clear()
    assert fetch(SOURCE, to=tmp_path / "some", NO_PROXY="localhost", **environment).code == 0
    assert set(proxy.seen) == {"127.0.0.1"}
    assert "canary" not in repr(outcome)


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1, as a file with its key and as a CA bundle."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "hub of the company")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    bundle, both = tmp_path / "ca.pem", tmp_path / "server.pem"
    bundle.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    both.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + bundle.read_bytes()
    )
    return bundle, both


def test_a_private_hub_is_trusted_only_with_its_ca_bundle(hub, certificate, fetch, tmp_path):
    bundle, both = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    hub.wrap(context)
    without = fetch(SOURCE, attempts=1, to=tmp_path / "without", HF_ENDPOINT=hub.endpoint)
    assert without.code == 69
    assert "set SSL_CERT_FILE to a CA bundle" in without.error
    trusted = fetch(SOURCE, to=tmp_path / "model", HF_ENDPOINT=hub.endpoint, SSL_CERT_FILE=bundle)
    # The store has no TLS, and a redirect from TLS to plain HTTP is refused.
    assert trusted.code == 69
    assert "redirects to plain HTTP" in trusted.error


def test_a_missing_ca_bundle_is_reported(fetch):
    outcome = fetch(SOURCE, SSL_CERT_FILE="/nowhere/ca.pem")
    assert outcome.code == 2
    assert "CA bundle" in outcome.error


def test_the_status_port_shows_the_progress(hub, tmp_path):
    port = free_port()
    hold, reached = threading.Event(), threading.Event()

    def before_piece() -> None:
        if sum(hub.sent.values()) > len(hub.files[published.SHARDS[0]]):
            reached.set()
            hold.wait()

    hub.before_piece = before_piece
    command = [sys.executable, "-m", "quire_server", "fetch", SOURCE, "--to", str(tmp_path / "model")]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
    with subprocess.Popen(
        [*command, "--status-port", str(port)], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert reached.wait(60)
        answer = httpx.get(f"http://127.0.0.1:{port}/statusz").json()
        hold.set()
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert answer["phase"] == "downloading"
    assert 0 < answer["loadedBytes"] < answer["totalBytes"]
    assert json.loads(lines[-1])["totalBytes"] == answer["totalBytes"]
