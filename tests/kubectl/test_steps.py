"""The steps of a rollout respect the limits of its strategy, whatever the numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire_kubectl import changes, steps

COUNTS = st.integers(min_value=1, max_value=40)
FEW = st.integers(min_value=0, max_value=5)


@given(old=COUNTS, wanted=COUNTS, surge=FEW, unavailable=FEW)
def test_the_steps_replace_all_pods_within_max_surge_and_max_unavailable(
    old: int, wanted: int, surge: int, unavailable: int
) -> None:
    taken = steps.rolling(old, wanted, surge=surge, unavailable=unavailable)
    if surge + unavailable == 0:
        return
    assert sum(step.starts for step in taken) == wanted and sum(step.stops for step in taken) == old
    for step in taken:
        assert step.serving >= min(old, wanted - unavailable)
        assert step.serving + step.starts <= max(old, wanted + surge)


@pytest.mark.parametrize(
    ("surge", "unavailable", "lines"),
    [
        (
            1,
            0,
            ["1. start 1 new: 3 of 3", "2 to 3. stop 1 old and start 1 new: 3 of 3", "4. stop 1 old: 3 of 3"],
        ),
        (0, 1, ["1 to 3. stop 1 old and start 1 new: 2 of 3"]),
    ],
)
def test_equal_steps_are_merged_into_one_line(surge: int, unavailable: int, lines: list[str]) -> None:
    reported = steps.described(steps.rolling(3, 3, surge=surge, unavailable=unavailable), 3)
    assert [line.partition(" serve meanwhile")[0] for line in reported] == lines


TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["yes", "1", "0x1", "null", "a: b", "- a", "~", "é\u2028", ""])
)
DOCUMENTS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.one_of(TEXTS, st.integers(), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
        max_leaves=10,
    ),
    max_size=4,
)


@given(DOCUMENTS)
def test_yaml_output_round_trips(document: dict[str, Any]) -> None:
    assert yaml.safe_load(changes.yaml([document])) == document


def test_changes_name_the_field_and_both_values() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "d": "x" * 99, "e": None}
    new = {"a": {"b": 2, "c": [1, 3]}, "d": "z", "f": {}}
    assert list(changes.between(old, new)) == [
        "a.b: 1 -> 2",
        "a.c[1]: 2 -> 3",
        f"d: {'x' * 57}... -> z",
        "e: null -> absent",
        "f: absent -> {}",
    ]
    assert list(changes.between(old, json.loads(json.dumps(old)))) == []
