"""For every test: the real model, patience, and which cases of a test take part in `make test`."""

from collections import Counter
from pathlib import Path

import hypothesis
import pytest

from e2e import models

# Machines that run tests are busy machines: how long one example takes, or to think of one, says nothing.
hypothesis.settings.register_profile(
    "quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quire")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark one_in(n): the first of n cases runs in `make test`, the others in `make deep`."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            item.add_marker(pytest.mark.deep)
        seen[test] += 1


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory (downloaded once, converted once, kept in .cache/)."""
    return models.smollm2()
