"""A small Llama, for tests that need no model of their own."""

from pathlib import Path

import pytest

from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families
from tests.server.runner.in_process import load


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers. Read only."""
    path = tmp_path_factory.mktemp("llama")
    families.make(path, "Llama, tied")
    return path


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelRunner:
    """A runner on the CPU, which computes one step after the other: the reference for runners on a device."""
    return load(directory)
