"""Links from pages to tests, as docs/security.md and docs/ledger.md have them.

A link leads to a file of the repository. Its text is the name of a test in that file, or the file's own name
where all its tests are meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.contracts import source_code

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/quire-dev/quire/blob/main/"


def broken(text: str) -> Iterator[str]:
    """What is wrong with the links to tests in a part of a page."""
    for name, place in links(text):
        path = ROOT / place
        if not path.is_file():
            yield f"{place} does not exist"
        elif name != path.name and name not in tests_of(path):
            yield f"{place} has no test {name}"


def links(text: str) -> list[tuple[str, str]]:
    """The text and the file of each link to a test."""
    return re.findall(rf"\[(\w+(?:\.py)?)\]\({re.escape(REPOSITORY)}((?:tests|e2e)/[\w/]+\.py)\)", text)


def tests_of(path: Path) -> set[str]:
    return {name for name, _ in source_code.of_file(path).functions if name.startswith("test_")}
