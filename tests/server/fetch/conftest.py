"""A hub with one model, a bucket server, and the fetch command run in this process."""

import json
import os
from collections import namedtuple

import certifi
import pytest

from e2e.cluster import programs
from e2e.failure_paths import recorder
from e2e.ports import free_port
from quire_server.__main__ import run
from tests.server.fetch import published
from tests.server.fetch.bucket_server import BIN, KEY, SECRET, running
from tests.server.fetch.hub_server import HubServer

Outcome = namedtuple("Outcome", "code lines error log")


@pytest.fixture
def hub():
    server = HubServer(published.files())
    yield server
    server.close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The folder of the bucket ``models``, and the gateway's address."""
    programs.build(BIN, ("versitygw",))
    root = tmp_path_factory.mktemp("s3")
    (root / "models").mkdir()
    port = free_port()
    flags = ("--access", KEY, "--secret", SECRET, "--port", f"127.0.0.1:{port}", "--quiet")
    with running(port, BIN / "versitygw", *flags, "posix", "--sidecar", str(root.parent), str(root)):
        yield root / "models", f"http://127.0.0.1:{port}"


@pytest.fixture
def fetch(monkeypatch, tmp_path, capfd):
    """fetch(source, *arguments, to=..., **environment) -> Outcome"""
    log = tmp_path / "termination-log"
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, certifi.where())
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_TERMINATION_LOG", str(log))

    def fetch(source, *arguments, to=tmp_path / "volume" / "model", attempts=2, stall=5, **environment):
        log.write_text("")
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        flags = ("--to", str(to), "--attempts", str(attempts), "--stall-timeout-seconds", str(stall))
        code = run(["fetch", source, *flags, *arguments], os.environ)
        printed, ended = capfd.readouterr(), log.read_text()
        lines = [json.loads(line) for line in printed.out.splitlines()]
        if ended:
            recorder.record("termination", json.loads(ended)["reason"])
        return Outcome(code, lines, printed.err, ended)

    return fetch
