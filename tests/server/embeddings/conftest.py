"""Servers of a random embedder and of a random cross-encoder, shared by the tests of their routes."""

import pytest

from tests.server.conftest import ADMIN_KEY, KEY
from tests.server.embeddings import embedders
from tests.server.launch import Server


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The directory of an embedder with the mean of its states, normalised."""
    return embedders.write(tmp_path_factory.mktemp("models") / "bert", "bert", pooling="mean_tokens")


@pytest.fixture(scope="session")
def reranker(tmp_path_factory):
    """The directory of a cross-encoder."""
    return embedders.write(tmp_path_factory.mktemp("models") / "reranker", "bert", cross_encoder=True)


@pytest.fixture(scope="session")
def embedder(bert, tmp_path_factory):
    """A running server that knows the keys of a client and of an admin."""
    directory = tmp_path_factory.mktemp("embedding")
    keys = directory / "keys"
    keys.mkdir()
    (keys / "alice").write_text(KEY)
    (keys / "root").write_text(f"{ADMIN_KEY}\nadmin: true\n")
    # Few rows and tokens: a request of many inputs takes several steps.
    flags = ("--task", "embed", "--api-keys-dir", str(keys), "--max-num-seqs", "8")
    with Server(bert, directory, *flags, "--max-num-batched-tokens", "64") as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def scorer(reranker, tmp_path_factory):
    """A running server of the cross-encoder."""
    with Server(reranker, tmp_path_factory.mktemp("scoring"), "--task", "embed") as server:
        yield server.wait_ready()
