"""The CRD and quire_operator.spec say the same: fields, types, defaults, bounds, rules."""

from __future__ import annotations

import ast
import json
import re
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import pytest

from e2e.api import specs
from e2e.api.cases import CASES, rules
from quire_operator import quantity, spec
from quire_operator.errors import SpecError
from quire_operator.spec import reader, validation
from quire_operator.spec.schema import Spec

ALL = dict(specs.schemas())
RULES = list(rules())
BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "pattern", "enum")
REMEDIES = r"\b(give|set|lower|raise|drop|choose|write)\b"


def tree(cls: type[Any] = Spec, path: str = "spec") -> dict[str, tuple[Field[Any], Any]]:
    """Every field of the spec's dataclasses with its type, by the path of its property."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        here, hint = f"{path}.{reader.camel(item.name)}", hints[item.name]
        if typing.get_origin(hint) is types.UnionType:
            hint = typing.get_args(hint)[0]
        found[here] = (item, hint)
        if typing.get_origin(hint) is tuple:
            here, hint = f"{here}[]", typing.get_args(hint)[0]
        if is_dataclass(hint) and isinstance(hint, type):
            found |= tree(hint, here)
    return found


FIELDS = tree()


def test_every_property_is_a_field_and_every_field_a_property() -> None:
    properties = {path for path in ALL if path.startswith("spec.") and not path.endswith("[]")}
    assert properties == set(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_has_the_bounds_and_the_default_of_its_property(path: str) -> None:
    item, hint = FIELDS[path]
    schema = ALL[path]
    limits = {key: item.metadata[key] for key in BOUNDS if key in item.metadata}
    if not item.metadata.get("quantity"):  # CEL rules say more about those; see below
        assert {key: schema[key] for key in BOUNDS if key in schema} == limits
    for inner, name in (("items", "items"), ("additionalProperties", "additionalProperties")):
        if name in item.metadata:
            assert {key: schema[inner][key] for key in BOUNDS if key in schema[inner]} == item.metadata[name]
    if "default" in schema:
        assert schema["default"] == item.default
    elif not is_dataclass(hint):
        assert item.default in (MISSING, None, "", ())


@pytest.mark.parametrize(
    "path", [path for path in ALL if path.startswith("spec") and "properties" in ALL[path]]
)
def test_what_is_required_has_no_default(path: str) -> None:
    inner = {p.rpartition(".")[2]: FIELDS[p][0] for p in FIELDS if p.rpartition(".")[0] == path}
    required = {
        name for name, item in inner.items() if item.default is MISSING and item.default_factory is MISSING
    }
    assert required == set(ALL[path].get("required", []))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_operator_judges_as_the_rule_does(rule: Any) -> None:
    for body in CASES[rule.id].accepted:
        spec.parse(body)
    for body in CASES[rule.id].refused:
        with pytest.raises(SpecError):
            spec.parse(body)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_refusal_says_what_to_do(rule: Any) -> None:
    assert re.search(REMEDIES, rule.message), rule.message


def test_flags_names_and_quantities_are_checked_by_the_same_expressions() -> None:
    text = " ".join(
        rule["rule"] for schema in ALL.values() for rule in schema.get("x-kubernetes-validations", [])
    )
    assert f"({'|'.join(validation.ALLOWED_FLAGS)})" in text
    assert quantity.PATTERN.replace(r"\.", "[.]") in text
    assert f"<= {validation.NAME_MAX_LENGTH} " in text
    assert f"'^{validation.NAME_PATTERN}$'" in text


def test_a_user_finds_every_property_described() -> None:
    undescribed = [
        path
        for path, schema in ALL.items()
        if path not in ("", "metadata") and not path.endswith("[]") and len(schema.get("description", "")) < 6
    ]
    assert undescribed == []


def test_everything_is_bounded() -> None:
    unbounded = [
        path for path, schema in ALL.items() if path not in ("apiVersion", "kind") and not _is_bounded(schema)
    ]
    assert set(unbounded) <= {"status.lastFailure.exitCode"}


@pytest.mark.parametrize(
    "path", [path for path, schema in ALL.items() if schema.get("x-kubernetes-int-or-string")]
)
def test_a_quantity_has_an_upper_bound(path: str) -> None:
    patch: Any = "9" * 18 + "Ti"
    for name in reversed(path.split(".")):
        patch = {name: patch}
    room = specs.minimal(engine={"kvCache": {"hostOffload": "1Gi"}}, resources={"memory": "64Ti"})
    if path.startswith("spec.cache"):
        room = specs.DOWNLOADED[0]
    if path.startswith("spec.disaggregation"):
        room = specs.DISAGGREGATED[0]
    with pytest.raises(SpecError, match=path):
        spec.parse(specs.merged(room, patch))


def _is_bounded(schema: specs.Body) -> bool:
    match schema.get("type"):
        case "string":
            return bool({"maxLength", "enum", "format"} & set(schema))
        case "integer":
            return "minimum" in schema and ("maximum" in schema or "default" not in schema)
        case "array":
            return "maxItems" in schema and "x-kubernetes-list-type" in schema
        case "object" if "additionalProperties" in schema:
            return "maxProperties" in schema
        case _:
            return True


def test_the_crd_is_small_enough_for_client_side_apply() -> None:
    """kubectl keeps it in an annotation, as compact JSON; all annotations of an object have 262,144 bytes."""
    assert len(json.dumps(specs.CRD, separators=(",", ":"))) < 200_000


def test_the_full_examples_use_every_field() -> None:
    examples = (
        specs.FULL,
        specs.AUTOSCALED,
        specs.IDLING,
        specs.SHARDED,
        specs.SHARING,
        specs.ADAPTED,
        specs.EMBEDDING,
        specs.GROUPED,
        *specs.DISAGGREGATED,
        *specs.DOWNLOADED,
    )
    paths = [path for body in examples for path in _paths(body["spec"], "spec")]
    used = {re.sub(r"\[\d+\]", "[]", path) for path in paths}
    assert set(FIELDS) - used == set()


@pytest.mark.parametrize("cls", [Spec, spec.Profile])
def test_every_field_is_read_by_the_operator_or_its_plugin(cls: type[Any]) -> None:
    """An option that nothing reads promises what does not happen. The pod gets the affinity as a whole."""
    read = {
        node.attr
        for path in (specs.ROOT / "operator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    unread = {path for path, (item, _) in tree(cls).items() if item.name not in read}
    assert {path for path in unread if not path.startswith("spec.scheduling.affinity.")} == set()


def test_no_reference_reaches_into_another_namespace() -> None:
    """A Gateway itself says from which namespaces it takes routes."""
    assert [path for path in ALL if path.endswith(".namespace")] == [
        "spec.networking.httpRoute.parentRefs[].namespace"
    ]


def test_the_charts_crd_is_this_crd() -> None:
    copies = list((specs.ROOT / "charts").rglob("llmdeployments.yaml"))
    assert copies, "the chart has no CRD"
    for copy in copies:
        assert copy.read_bytes() == (specs.ROOT / "crds" / "llmdeployments.yaml").read_bytes(), (
            f"copy crds/ to {copy}"
        )


def _paths(value: Any, path: str) -> list[str]:
    match value:
        case dict():
            inner = [found for key in value for found in _paths(value[key], f"{path}.{key}")]
        case list():
            inner = [found for i, entry in enumerate(value) for found in _paths(entry, f"{path}[{i}]")]
        case _:
            inner = []
    return [path, *inner]
