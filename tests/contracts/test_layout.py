"""The source tree: nothing shadows the standard library, functions are short, modules have docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contracts import source_code

ROOT = Path(__file__).parents[2]
SHELVES = {
    "operator": {"quire_kubectl", "quire_metrics_adapter", "quire_operator", "quire_sizing"},
    "server": {"quire_batch", "quire_gateway", "quire_http", "quire_server"},
    "kernels": {"quire_kernels"},
}
NOT_PYTHON = {"Dockerfile", "gateway.Dockerfile"}

MAX_FUNCTION_LINES = 60
VAGUE = {"utils", "util", "helpers", "common", "misc"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def packages() -> list[Path]:
    return sources(*(f"{shelf}/{package}" for shelf, held in SHELVES.items() for package in held))


@pytest.mark.parametrize("shelf", SHELVES)
def test_a_shelf_holds_its_packages_and_nothing_importable(shelf: str) -> None:
    """operator/__init__.py, even an empty one, would take the place of the standard library's operator."""
    found = {path.name for path in (ROOT / shelf).iterdir() if path.name != "__pycache__"}
    assert found - NOT_PYTHON == SHELVES[shelf]


def test_no_module_has_the_name_of_one_of_the_standard_library() -> None:
    names = {path: path.parent.name if path.stem == "__init__" else path.stem for path in packages()}
    assert [str(path) for path, name in names.items() if name in sys.stdlib_module_names] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(path) for path in sources("operator", "server", "kernels", "e2e") if path.stem in VAGUE] == []


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_function_is_longer_than_a_screen() -> None:
    checked = [*sources("operator", "server", "e2e")]
    assert {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in checked
        for name, lines in source_code.of_file(path).functions
        if lines > MAX_FUNCTION_LINES
    } == {}


def test_every_module_says_why_it_exists() -> None:
    silent = [
        str(path)
        for path in [*packages(), *sources("e2e")]
        if path.read_text(encoding="utf-8").strip() and not source_code.of_file(path).docstring
    ]
    assert silent == []
