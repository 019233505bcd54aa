"""The tiny model of the tests that start the real server."""

from tests.server.conftest import tiny

__all__ = ["tiny"]
