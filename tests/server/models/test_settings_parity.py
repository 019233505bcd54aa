"""Every setting of a family's config.json gives transformers' answers or is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.models import families, settings

MODELS = settings.models()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("cell", "changes"), MODELS.items(), ids=[" - ".join(cell) for cell in MODELS])
def test_the_answers_are_those_of_transformers(
    tmp_path: Path, cell: tuple[str, str], changes: dict[str, Any]
) -> None:
    model = families.build(tmp_path, cell[1], changes)
    families.assert_same(tmp_path, model)
