"""Fixtures for every test: the real model, and threads and seeds that do not depend on the machine."""

from pathlib import Path

import pytest

from e2e import models


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory (downloaded once, converted once, kept in .cache/)."""
    return models.smollm2()
