"""The small model that the tests of the runner ask, where they need none of their own."""

from pathlib import Path

import pytest

from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families
from tests.server.runner.in_process import load


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers; nobody writes there."""
    path = tmp_path_factory.mktemp("llama")
    families.make(path, "Llama, tied")
    return path


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelRunner:
    """On the CPU, one step after the other: what a device is held against."""
    return load(directory)
