"""For every test: the real model, and patience."""

from pathlib import Path

import hypothesis
import pytest

from e2e import models

# Machines that run tests are busy machines: how long one example takes, or to think of one, says nothing.
hypothesis.settings.register_profile(
    "quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quire")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory (downloaded once, converted once, kept in .cache/)."""
    return models.smollm2()
