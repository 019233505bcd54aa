"""TLS to the limit store, before a real server: certificates are verified, and no URL changes that."""

import subprocess

import pytest
from redis import Redis
from redis.exceptions import RedisError

from e2e.cluster import valkey
from e2e.cluster.pki import Authority, Identity
from e2e.ports import free_ports
from e2e.waiting import eventually
from quire_gateway import limit_store
from quire_gateway.limit_store import LimitStore
from quire_gateway.limit_store_url import LimitStoreError, read_url
from tests.gateway.limit_store_server import ROOT

SCRIPT = "return 'ok'"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("authority"))
    authority.issue(Identity("store", "store", serves=("localhost",)))
    return authority


@pytest.fixture(scope="module")
def port(authority):
    """Of a server that speaks TLS alone, as `localhost`."""
    (port,) = free_ports(1)
    files = {"cert": "store.crt", "key": "store.key", "ca-cert": "ca.crt"}
    tls = [
        text for name, file in files.items() for text in (f"--tls-{name}-file", authority.directory / file)
    ]
    options = [
        "--port",
        0,
        "--tls-port",
        port,
        "--tls-auth-clients",
        "no",
        "--bind",
        "127.0.0.1",
        "--save",
        "",
    ]
    command = ["setpriv", "--pdeathsig", "KILL", *valkey.unpack(ROOT / ".cluster"), *map(str, options + tls)]
    with (authority.directory / "store.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=authority.directory, stdout=log, stderr=log)
    client = Redis(host="localhost", port=port, ssl=True, ssl_ca_certs=str(authority.certificate))

    def answers():
        try:
            return client.ping()
        except RedisError:
            return False

    eventually("the store answers", answers)
    yield port
    client.close()
    process.kill()
    process.wait()


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What a store by this URL answers, with this authority beside it."""
    monkeypatch.setattr(limit_store, "CONNECT_SECONDS", 30.0)  # a handshake on a busy machine

    async def asked(url, authority=None):
        (tmp_path / "url").write_text(url)
        if authority is not None:
            (tmp_path / "ca.crt").write_text(authority.certificate.read_text())
        store = LimitStore(tmp_path / "url", SCRIPT, 30.0)
        try:
            return await store.run_script([("key", [])])
        finally:
            await store.close()

    return asked


async def test_a_store_with_a_certificate_of_its_authority_is_asked(asked, port, authority):
    assert await asked(f"rediss://localhost:{port}", authority) == [b"ok"]


async def test_a_store_whose_authority_is_not_known_is_not_asked(asked, port, tmp_path):
    for other in (None, Authority(tmp_path / "other")):
        with pytest.raises(LimitStoreError) as error:
            await asked(f"rediss://localhost:{port}", other)
        assert error.value.reason == "connection"


async def test_a_store_with_the_certificate_of_another_host_is_not_asked(asked, port, authority):
    with pytest.raises(LimitStoreError) as error:
        await asked(f"rediss://127.0.0.1:{port}", authority)
    assert error.value.reason == "connection"


async def test_authorities_of_the_system_count_where_none_is_beside_the_url(
    asked, port, authority, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    assert await asked(f"rediss://localhost:{port}") == [b"ok"]


@pytest.mark.parametrize(
    "option",
    ["ssl_cert_reqs=none", "ssl_check_hostname=false", "a=1&ssl_cert_reqs=optional", "ssl_ca_certs=x"],
)
def test_a_url_that_would_change_how_a_store_is_verified_is_refused(tmp_path, option):
    (tmp_path / "url").write_text(f"rediss://:hunter2@localhost:1/0?{option}")
    with pytest.raises(LimitStoreError, match="ssl_") as error:
        read_url(tmp_path / "url")
    assert error.value.reason == "config" and "hunter2" not in str(error.value)
