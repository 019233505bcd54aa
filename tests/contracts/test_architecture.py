"""ARCHITECTURE.md: the two walks through the code name files that exist, and stay short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
WALKS = ("The life of one chat request", "The life of one LLMDeployment")
MAX_FILES = 12
MAX_GLOSSARY_LINES = 40


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"ARCHITECTURE.md has no section {title!r}"
    return found[1]


def files_of(title: str) -> list[str]:
    """The file that each numbered item of a walk begins with."""
    items = re.findall(r"^\d+\. (.*)$", section(title), re.MULTILINE)
    starts = [re.match(r"`([\w/.]+)`", item) for item in items]
    assert all(starts), f"an item of {title!r} does not begin with a file: {items}"
    return [start[1] for start in starts if start]


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_at_most_twelve_files_and_all_of_them_exist(title: str) -> None:
    files = files_of(title)
    assert 1 < len(files) <= MAX_FILES
    assert [path for path in files if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_numbered_from_one_in_order(title: str) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section(title), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_path_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:server|operator|kernels|crds|tests|e2e|docs|charts|bench)/[\w/.-]+)`", PAGE)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_glossary_is_short() -> None:
    assert 0 < len(section("Glossary").strip().splitlines()) <= MAX_GLOSSARY_LINES
