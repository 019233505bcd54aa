"""What `make up` makes of its environment."""

from pathlib import Path

import pytest

from e2e.up import flow
from e2e.up.errors import UpError


def test_a_number_of_nodes_that_cannot_be_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    for text in ("3", "0", "two", "-1"):
        with pytest.raises(UpError, match=f"NODES={text}: give a number from 1 to 2"):
            flow.run(tmp_path, {"NODES": text})
    assert list(tmp_path.iterdir()) == []
