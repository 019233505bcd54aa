"""docs/security.md says of every field what it could do, who decides about it and where that is enforced;
and of every threat what stops it, and which test shows that.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.api import specs
from quire_operator.resources import environment
from quire_operator.spec import validation
from quire_server import flags
from quire_server.config import ServeConfig
from tests.contracts import linked_tests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LEAVES = [
    path.removeprefix("spec.")
    for path, schema in specs.schemas()
    if path.startswith("spec.") and "properties" not in schema and schema.get("type") != "array"
]


POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PARTIES = set(re.findall(r"^\| \*\*(\w+)\*\*", POLICY, re.MULTILINE))


def rows() -> Iterator[tuple[list[str], list[str]]]:
    """The fields of each row of the table, and its other cells."""
    table = PAGE.partition("\n## Fields\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            yield list(patterns(first)), cells


def patterns(cell: str) -> Iterator[str]:
    """The fields that a cell names; one that begins with a dot is beside the one before it."""
    base = ""
    for name in re.findall(r"`([^`]+)`", cell):
        if not name.startswith("."):
            base = name.rpartition(".")[0]
        yield base + name if name.startswith(".") else name


def matches(leaf: str, pattern: str) -> bool:
    escaped = pattern.replace("[", "[[]")
    return fnmatch.fnmatchcase(leaf, escaped)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_field_has_exactly_one_row(leaf: str) -> None:
    found = [fields for fields, _ in rows() if any(matches(leaf, pattern) for pattern in fields)]
    assert len(found) == 1, f"spec.{leaf}: say in docs/security.md what it could do, and who prevents that"


def test_a_row_names_fields_that_exist_and_fills_every_cell() -> None:
    for fields, cells in rows():
        for pattern in fields:
            assert pattern == "metadata.name" or any(matches(leaf, pattern) for leaf in LEAVES), pattern
        assert len(cells) == 3 and all(cells), fields
        assert cells[1] in ("tenant", "owner", "platform"), fields


def test_the_page_lists_the_variables_that_are_always_allowed() -> None:
    (server,) = re.findall(r"Always allowed in `engine.env`: (.*?); in\n", PAGE, re.DOTALL)
    assert re.findall(r"`([A-Z_]+)`", server) == list(environment.SERVER)
    listed = (ROOT / "charts/quire/files/server-env.txt").read_text(encoding="utf-8").split()
    assert listed == list(environment.SERVER), "the admission policy allows what the operator allows"


def test_no_flag_that_a_user_may_set_names_a_file_an_address_or_a_credential() -> None:
    fields = {
        field.name.replace("_", "-"): field for field in vars(ServeConfig)["__dataclass_fields__"].values()
    }
    assert set(validation.ALLOWED_FLAGS) <= set(fields)
    tuning = (flags.path, flags.url, flags.nonempty, flags.names)
    for name in validation.ALLOWED_FLAGS:
        assert fields[name].metadata["parse"] not in tuning, name


def threats() -> Iterator[list[str]]:
    """The cells of each row of the table of threats."""
    table = PAGE.partition("\n## Threats\n")[2].partition("\n## ")[0]
    for line in table.splitlines()[1:]:
        if line.startswith("| ") and not line.startswith("| threat |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_a_threat_says_who_attacks_what_stops_it_and_which_tests_show_that() -> None:
    listed = list(threats())
    attackers = {party for _, who, *_ in listed for party in who.split(", ")}
    assert attackers == PARTIES, "the parties of SECURITY.md's threat model"
    for threat, _, stops, tests in listed:
        assert stops, threat
        assert linked_tests.links(tests), f"{threat}: link a test"
        assert tests.count("](") == len(linked_tests.links(tests)), f"{threat}: a link that is not a test"
        assert list(linked_tests.broken(tests)) == [], threat
