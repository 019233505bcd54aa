"""docs/ledger.md: each fixed bug says what found it, and links the test that keeps it from coming back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.contracts import linked_tests

PAGE = (linked_tests.ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
WAYS = set(re.findall(r"\*\*(\w+)\*\* \(", PAGE))


def rows() -> Iterator[list[str]]:
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| what broke "):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row[0][:60])
def test_a_bug_says_what_found_it_and_which_test_shows_that_it_is_fixed(row: list[str]) -> None:
    _, found_by, tests = row
    assert found_by in WAYS
    assert linked_tests.links(tests)
    assert tests.count("](") == len(linked_tests.links(tests)), "a link that is not a test"
    assert list(linked_tests.broken(tests)) == []


def test_every_way_that_the_page_explains_has_found_a_bug() -> None:
    assert {found_by for _, found_by, _ in rows()} == WAYS
