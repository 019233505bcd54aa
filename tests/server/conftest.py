"""Fixtures of the tests that start the real server."""

import pytest

from tests.server import tiny_model
from tests.server.launch import Server

KEY = "alice-s-key"
ADMIN_KEY = "root-s-key"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a random two-layer Llama."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny, tmp_path_factory):
    """One running server that knows the keys of a client and of an admin."""
    directory = tmp_path_factory.mktemp("serving")
    keys = directory / "keys"
    keys.mkdir()
    (keys / "alice").write_text(KEY)
    (keys / "root").write_text(f"{ADMIN_KEY}\nadmin: true\n")
    # Room for the longest answers of as many requests as run at once.
    flags = ("--api-keys-dir", str(keys), "--kv-cache-memory-bytes", str(32 << 20))
    with Server(tiny, directory, *flags) as server:
        yield server.wait_ready()
