"""Fixtures of the tests that start the real server."""

import pytest

from tests.server import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a random two-layer Llama."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
