"""A gateway that is a stub, its keys, and quire-batch behind it."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.batch.launch import Batch, Signer, close_clients, write_keys
from tests.batch.postgres import Postgres
from tests.batch.stub_gateway import StubGateway


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("keys") / "gateway")


@pytest.fixture(scope="session")
def signer(keys):
    return Signer(keys)


@pytest.fixture(scope="session")
def postgres():
    """In a directory of its own: its socket's path must be short, and its user must get there."""
    directory = Path(tempfile.mkdtemp(prefix="quire-pg-"))
    directory.chmod(0o755)
    try:
        with Postgres(directory / "pg") as server:
            yield server
    finally:
        shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def _closed_clients():
    yield
    close_clients()


@pytest.fixture
def gateway():
    with StubGateway() as stub:
        yield stub


@pytest.fixture
def start(gateway, keys, tmp_path):
    """Starts a quire-batch with these settings."""
    started = []

    def start(directory=None, **environ):
        batch = Batch(gateway.url, keys, directory or tmp_path / "state", **environ)
        started.append(batch)
        return batch.wait_ready()

    yield start
    for each in started:
        each.__exit__(None)
