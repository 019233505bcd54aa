"""The CRD of AcceleratorProfiles, what the operator reads of them, what the chart ships, and sizing agree."""

from __future__ import annotations

from dataclasses import fields

import pytest

from e2e.api import profiles, specs
from quire_operator import quantity
from quire_operator.errors import SpecError
from quire_operator.spec import Profile, reader
from quire_operator.spec.profiles import parse
from quire_sizing.accelerators import SHEETS

PROPERTIES = profiles.SCHEMA["properties"]["spec"]["properties"]
BOUNDS = ("maxLength", "minLength", "maxItems", "maxProperties", "pattern", "enum")


def test_every_property_is_a_field_with_its_bounds() -> None:
    known = {reader.camel(item.name): item for item in fields(Profile)}

    assert known.keys() == PROPERTIES.keys() == profiles.FULL["spec"].keys()
    for name, item in known.items():
        if not item.metadata.get("quantity"):
            expected = {key: item.metadata[key] for key in BOUNDS if key in item.metadata}
            assert {key: PROPERTIES[name][key] for key in BOUNDS if key in PROPERTIES[name]} == expected
        assert PROPERTIES[name].get("default", item.default) == item.default or name == "nodeSelector"


@pytest.mark.parametrize("rule", profiles.CASES)
def test_the_operator_judges_as_the_rule_does(rule: str) -> None:
    accepted, refused = profiles.CASES[rule]
    for body in accepted:
        parse(body)
    for body in refused:
        with pytest.raises(SpecError, match=r"AcceleratorProfile h100: spec\."):
            parse(body)


def test_tolerations_are_those_of_an_llm_deployment() -> None:
    ours = specs.SPEC_SCHEMA["properties"]["scheduling"]["properties"]["tolerations"]["items"]["properties"]
    assert PROPERTIES["tolerations"]["items"]["properties"] == ours


def test_the_chart_ships_the_sheets_that_sizing_counts_with() -> None:
    shipped = {body["metadata"]["name"]: parse(body) for body in profiles.SHIPPED}

    assert shipped.keys() == SHEETS.keys()
    for name, sheet in SHEETS.items():
        found = shipped[name]
        assert found.resource_name == sheet.resource_name
        assert quantity.whole_bytes(found.memory) == sheet.accelerator.memory
        assert quantity.whole_bytes(found.memory_bandwidth) == sheet.accelerator.bandwidth
        assert found.interconnect == sheet.accelerator.interconnect


def test_the_charts_crd_is_this_crd() -> None:
    canonical = (specs.ROOT / "crds" / "acceleratorprofiles.yaml").read_bytes()
    assert (specs.ROOT / "charts/quire/files/acceleratorprofiles.yaml").read_bytes() == canonical
